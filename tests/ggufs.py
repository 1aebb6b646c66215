"""Writes tiny GGUF files for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
from tokenizers import pre_tokenizers

import tiny

END = "<|end|>"
TOKENS = [END, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def model() -> Any:
    """What the files hold: a byte-level Llama whose embedding is padded by seven rows."""
    return tiny.model("llama", vocab_size=len(TOKENS) + 7, eos_token_id=0)


def write_parts(path: Path) -> list[Path]:
    """Write the file in two parts, as llama.cpp splits files."""
    write(path, split_max_tensors=20)
    return sorted(path.parent.glob(f"{path.stem}-*-of-00002.gguf"))


def write(path: Path, architecture: str = "llama", **options: Any) -> Path:
    """A GGUF of `model()`, in float32."""
    made = model()
    writer = gguf.GGUFWriter(path, architecture, **options)
    _facts(writer, made.config)
    _tokens(writer)
    state = {name: tensor.numpy() for name, tensor in made.state_dict().items()}
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    for layer in range(made.config.num_hidden_layers):
        names |= {f"blk.{layer}.{a}": f"model.layers.{layer}.{b}" for a, b in _PARTS.items()}
    heads = {"attn_q": made.config.num_attention_heads, "attn_k": made.config.num_key_value_heads}
    for ours, theirs in names.items():
        weight = state[f"{theirs}.weight"]
        part = ours.rpartition(".")[2]
        if part in heads:  # llama.cpp pairs neighbouring dimensions
            shape = (heads[part], 2, weight.shape[0] // heads[part] // 2, weight.shape[1])
            weight = weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(f"{ours}.weight", weight.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _facts(writer: Any, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)


def _tokens(writer: Any) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, *[1] * (len(TOKENS) - 1)])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
