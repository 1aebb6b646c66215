"""Tiny random hybrids: some layers attend, others keep a recurrent or convolution state."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import tiny
from moaspec.target.generic.generic_target import GenericTarget, target_of

_LINEAR, _FULL = "linear_attention", "full_attention"
_COMMON: dict[str, Any] = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LAYERS = {"num_hidden_layers": 4, "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR]}
_DELTA = _LAYERS | {
    "head_dim": 12,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED_EXPERT = _EXPERTS | {"shared_expert_intermediate_size": 24}
_CONV = {"num_hidden_layers": 4, "layer_types": ["conv", "conv", _FULL, "conv"]}
_MAMBA2 = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}
_MAMBA = {"mamba_d_state": 8, "mamba_dt_rank": 4}
_SHARED_LAYERS = {"num_hidden_layers": 5, "num_key_value_heads": 6}

MODELS: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA2 | {"num_hidden_layers": 4, "attn_layer_indices": [2]},
    "falcon_h1": _MAMBA2
    | {
        "num_hidden_layers": 3,
        "mamba_d_ssm": 96,
        "embedding_multiplier": 2.0,
        "ssm_in_multiplier": 1.5,
        "key_multiplier": 0.7,
        "lm_head_multiplier": 0.5,
    },
    "granitemoehybrid": _MAMBA2
    | _LAYERS
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
        "embedding_multiplier": 2.0,
        "logits_scaling": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.5,
    },
    "jamba": _MAMBA
    | {
        "num_hidden_layers": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "lfm2": _CONV | {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": _CONV | _EXPERTS | {"num_dense_layers": 2},
    "nemotron_h": {
        "layers_block_type": [_LINEAR, "mlp", _FULL, "moe", _LINEAR, "mlp"],
        "head_dim": 12,
        "ssm_state_size": 8,
        "mamba_num_heads": 6,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
    },
    "olmo_hybrid": _DELTA | {"linear_num_value_heads": 2},
    "qwen3_5_moe_text": _DELTA | _SHARED_EXPERT,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA | _SHARED_EXPERT,
    "zamba": _SHARED_LAYERS
    | _MAMBA
    | {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "mamba"], "n_mamba_heads": 2},
    "zamba2": _SHARED_LAYERS
    | {
        "layers_block_type": [_LINEAR, "hybrid", _LINEAR, "hybrid", _LINEAR],
        "mamba_d_state": 8,
        "mamba_ngroups": 2,
        "n_mamba_heads": 6,
        "chunk_size": 8,
        "use_mem_rope": True,
        "adapter_rank": 4,
    },
}
"""What each model has beside `_COMMON`."""
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 48,
}
MULTIMODAL = {"qwen3_5": "qwen3_5_text"}
"""Models with a vision part, and the type of their text part."""
KINDS = (*MODELS, *MULTIMODAL)


def model(kind: str, *, seed: int = 0, **changes: Any) -> Any:
    """A random model; its weights are large, so that its text varies."""
    own = copy.deepcopy(_COMMON | MODELS.get(MULTIMODAL.get(kind, kind), {}) | changes)
    make: Any = AutoModelForCausalLM
    if kind in MULTIMODAL:
        make, own = AutoModelForImageTextToText, {"text_config": own, "vision_config": _VISION}
    torch.manual_seed(seed)
    made = make.from_config(AutoConfig.for_model(kind, **own), attn_implementation="sdpa")
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return made


@functools.cache
def target(kind: str) -> GenericTarget:
    """The target that tests share; nobody changes it."""
    made = target_of(model(kind), None, name=f"tiny-{kind}")
    assert isinstance(made, GenericTarget)
    return made
