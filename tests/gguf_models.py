"""Writes tiny random models of transformers as GGUF files, as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from transformers import AutoConfig, AutoModelForCausalLM

F32, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0
VOCAB = 96
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_AFTER_ATTENTION = ("gemma2", "gemma3", "olmo2", "seed_oss")
_PAIRS = ("llama", "mistral3", "granite", "smollm3", "arcee")


def model(model_type: str, **changes: Any) -> Any:
    """A random model of transformers whose norms and biases are not trivial."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(_COMMON | changes))
    made: Any = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return made


def write(
    path: Path,
    architecture: str,
    made: Any,
    *,
    fields: Mapping[str, Any] = {},
    factors: Mapping[str, Any] = {},
    change: Callable[[dict[str, np.ndarray]], None] = lambda _: None,
    split: int = 0,
    quantised: bool = False,
    others: Mapping[str, Any] = {},
    stored: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] = {},
    vocabulary: bool = True,
) -> Path:
    """Write a model in float32, with a vocabulary of single characters.

    Args:
        fields: of the architecture, beside the usual ones; None leaves a usual one out.
        factors: tensors of the rotary embeddings.
        change: changes the tensors before they are written.
        split: number of tensors of each part; 0 writes one file.
        quantised: write matrices as Q8_0.
        others: fields outside the architecture.
        stored: bytes and type of some tensors, in place of the model's.
    """
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    for key, value in (_fields(made.config) | dict(fields)).items():
        if value is not None:
            _add(writer, f"{architecture}.{key}", value)
    for key, value in others.items():
        _add(writer, key, value)
    if vocabulary:
        _tokens(writer, made.config.vocab_size)
    tensors = {**_tensors(architecture, made), **{k: np.array(v, "f4") for k, v in factors.items()}}
    change(tensors)
    for name, value in tensors.items():
        if name in stored:
            blocks, kind = stored[name]
            writer.add_tensor(name, blocks, raw_dtype=kind)
            continue
        kind = Q8_0 if quantised and value.ndim > 1 else F32
        writer.add_tensor(name, quantize(np.ascontiguousarray(value), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not split else sorted(path.parent.glob(f"{path.stem}-00001-of-*"))[0]


def _fields(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    heads = config.num_attention_heads
    made = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
    }
    if config.model_type == "starcoder2":
        return made | {"attention.layer_norm_epsilon": config.norm_epsilon}
    return made | {"attention.layer_norm_rms_epsilon": config.rms_norm_eps}


def _add(writer: Any, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    if type(value) is int and value < 0:
        add[int] = writer.add_int32
    add |= {str: writer.add_string, list: writer.add_array}
    add[type(value)](key, value)


def _tokens(writer: Any, size: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    letters = [chr(33 + i) for i in range(size - 4)]
    writer.add_token_list(["<0>", "<1>", "<2>", *letters, '!"'])
    writer.add_token_types([3, 3, 3, *[1] * (size - 3)])
    writer.add_token_merges(['! "'])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _tensors(architecture: str, made: Any) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    config = made.config
    for key, value in made.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        found |= _stored(architecture, config, key, value.numpy())
    return found


def _stored(architecture: str, config: Any, key: str, value: np.ndarray) -> dict[str, np.ndarray]:
    part, _, suffix = key.rpartition(".")
    if architecture.startswith("gemma") and part.endswith("norm"):
        value = value + 1
    if part in _OUTSIDE:
        return {f"{_OUTSIDE[part]}.{suffix}": value}
    _, _, layer, part = key.split(".", 3)
    if part == "mlp.experts.down_proj":
        return {f"blk.{layer}.ffn_down_exps.weight": value}
    if part == "mlp.experts.gate_up_proj":
        gate, up = np.split(value, 2, axis=1)
        return {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
    part = part.rpartition(".")[0]
    heads = {"self_attn.q_proj": config.num_attention_heads}
    heads["self_attn.k_proj"] = config.num_key_value_heads
    if architecture in _PAIRS and part in heads:
        shape = (heads[part], 2, value.shape[0] // heads[part] // 2, *value.shape[1:])
        value = value.reshape(shape).swapaxes(1, 2).reshape(value.shape)
    name = _NAMES[part]
    if part == "post_attention_layernorm" and architecture in _AFTER_ATTENTION:
        name = "post_attention_norm"
    return {f"blk.{layer}.{name}.{suffix}": value}
