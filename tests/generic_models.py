"""Tiny random models of types beyond the families of `moaspec_core.tokens.names`."""

from __future__ import annotations

import copy
import textwrap
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

VOCAB, WINDOW = 64, 8
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_HEAD_DIM = {"head_dim": 8}
_OWN_STOP = {"eos_token_id": 63}
"""Without one, its config takes ids beyond this vocabulary."""
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_WINDOWS = {"sliding_window": WINDOW, "layer_types": _MIXED}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_MLA = {
    "num_key_value_heads": 6,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
}

MODELS: dict[str, dict[str, Any]] = {
    "afmoe": _EXPERTS | _HEAD_DIM | _WINDOWS | {"num_dense_layers": 1},
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "cohere": {},
    "cohere2": _WINDOWS,
    "cwm": _WINDOWS | _HEAD_DIM | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    "deepseek_v2": _ROUTED | _MLA,
    "deepseek_v3": _ROUTED | _MLA,
    "diffllama": {},
    "dots1": _ROUTED | _HEAD_DIM | _WINDOWS,
    "ernie4_5": _HEAD_DIM,
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 40,
        "moe_layer_start_index": 1,
    },
    "exaone4": _WINDOWS,
    "exaone_moe": _EXPERTS | _WINDOWS | {"first_k_dense_replace": 1},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "gemma": _HEAD_DIM,
    "gemma2": _HEAD_DIM
    | _WINDOWS
    | {"query_pre_attn_scalar": 8, "final_logit_softcapping": 4.0, "attn_logit_softcapping": 2.0},
    "gemma3n_text": _HEAD_DIM
    | _WINDOWS
    | {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 2,
        "num_hidden_layers": 5,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
        ],
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 5,
        "altup_num_inputs": 2,
        "intermediate_size": [56] * 5,
    },
    "gemma4_text": _HEAD_DIM
    | _WINDOWS
    | {
        "global_head_dim": 12,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 2,
        "num_hidden_layers": 5,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
        ],
    },
    "glm": _HEAD_DIM | _OWN_STOP,
    "glm4": _HEAD_DIM | _OWN_STOP,
    "glm4_moe": _ROUTED | _HEAD_DIM,
    "glm4_moe_lite": _ROUTED | _MLA,
    "gpt2": {},
    "gpt_neox": {},
    "gpt_oss": _HEAD_DIM | _LOCAL_EXPERTS | _WINDOWS,
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "granitemoe": _LOCAL_EXPERTS | {"logits_scaling": 3.0},
    "granitemoeshared": _LOCAL_EXPERTS | {"shared_intermediate_size": 40},
    "helium": _HEAD_DIM,
    "hunyuan_v1_dense": _HEAD_DIM,
    "hunyuan_v1_moe": _HEAD_DIM | {"num_experts": 4, "moe_topk": 2},
    "jais2": _HEAD_DIM,
    "laguna": _EXPERTS | _HEAD_DIM | _WINDOWS,
    "llama4_text": _HEAD_DIM
    | _LOCAL_EXPERTS
    | {
        "attention_chunk_size": WINDOW,
        "intermediate_size_mlp": 56,
        "interleave_moe_layer_step": 2,
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
        "no_rope_layers": [1, 0, 1],
    },
    # Each of its layers has two attentions.
    "longcat_flash": _MLA
    | {
        "num_hidden_layers": 4,
        "head_dim": 4,
        "ffn_hidden_size": 56,
        "expert_ffn_hidden_size": 40,
        "n_routed_experts": 4,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
    "mellum": _EXPERTS | _HEAD_DIM | _WINDOWS,
    "minimax_m2": _HEAD_DIM | _LOCAL_EXPERTS,
    "ministral": _HEAD_DIM | _WINDOWS,
    "ministral3": _HEAD_DIM,
    "minicpm3": _MLA,
    "mixtral": _LOCAL_EXPERTS | {"sliding_window": WINDOW},
    "nanochat": {},
    "nemotron": _HEAD_DIM,
    "olmo": {},
    "olmo3": _WINDOWS,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "persimmon": {},
    "phi": {},
    "phimoe": _LOCAL_EXPERTS | _HEAD_DIM | {"sliding_window": WINDOW},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 40},
    "qwen3_moe": _EXPERTS | _HEAD_DIM,
    "seed_oss": _HEAD_DIM,
    "smollm3": {"no_rope_layers": [1, 1, 0]},
    "solar_open": _ROUTED | _HEAD_DIM,
    "stablelm": {},
    "starcoder2": {"sliding_window": WINDOW},
    "vaultgemma": _HEAD_DIM | _WINDOWS | {"query_pre_attn_scalar": 8},
    "youtu": _MLA,
}
"""What makes a type special, by model type."""


_TINY_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 48,
}
_GEMMA3_TEXT = _HEAD_DIM | _WINDOWS | {"query_pre_attn_scalar": 8}
_SECTIONS = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}
}

MULTIMODAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": (_GEMMA3_TEXT, {"vision_config": _TINY_VISION, "mm_tokens_per_image": 4}),
    "gemma4": (
        MODELS["gemma4_text"] | {"pad_token_id": 0},
        {"vision_config": _TINY_VISION, "audio_config": None},
    ),
    "mistral3": (
        {"model_type": "mistral", "sliding_window": None},
        {"vision_config": _TINY_VISION | {"model_type": "pixtral"}},
    ),
    "qwen2_5_vl": (_SECTIONS, {"vision_config": _QWEN_VISION | {"fullatt_block_indexes": [0]}}),
    "qwen3_vl": (
        _SECTIONS | _HEAD_DIM,
        {"vision_config": _QWEN_VISION | {"deepstack_visual_indexes": [0]}},
    ),
}
"""The text part and the rest of multimodal models, by model type."""

KINDS = (*MODELS, *MULTIMODAL)


def config(kind: str, **changes: Any) -> Any:
    """Config of a tiny model of this type, which may be one that is refused."""
    if kind not in MULTIMODAL:
        settings = _COMMON | MODELS.get(kind, {}) | changes
        return AutoConfig.for_model(kind, **copy.deepcopy(settings))
    text, rest = copy.deepcopy(MULTIMODAL[kind])
    return AutoConfig.for_model(kind, text_config=_COMMON | text | changes, **rest)


def model(kind: str, *, seed: int = 0, **changes: Any) -> Any:
    """A random model of transformers; its weights are large, so that its text varies."""
    make = AutoModelForImageTextToText if kind in MULTIMODAL else AutoModelForCausalLM
    torch.manual_seed(seed)
    made = make.from_config(config(kind, **changes))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias") or "norm" in name or "sinks" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return made.eval()


def table() -> str:
    """The list of types in docs/models.md."""
    names = [f"`{kind}`" for kind in sorted(KINDS)]
    lines = textwrap.wrap(", ".join(names) + ".", width=118, break_on_hyphens=False)
    return "\n".join(lines)
