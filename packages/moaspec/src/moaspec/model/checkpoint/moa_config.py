"""The config of a drafter in its checkpoint: sizes, target and N.

Our checkpoints record it in the `moaspec` section of `config.json`. For published ones, raw or
converted for vLLM, sizes are read from the tensors.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moaspec.model.checkpoint.tensor_names import DRAFT_TOKENS
from moaspec_core.checkpoint.directory import CONFIG_FILE
from moaspec_core.checkpoint.drafter_config import (
    DrafterConfig,
    LayerConfig,
    Rates,
    TargetIdentity,
    activation_name,
    norm_eps,
    text_rope,
)
from moaspec_core.errors import CheckpointError, CorruptCheckpointError, MismatchError

FORMAT_VERSION = 1
SECTION = "moaspec"  # section of `config.json` in our checkpoints


def config_from_json(section: Mapping[str, Any]) -> DrafterConfig:
    """Read the `moaspec` section that `save_drafter` writes."""
    values = {key: value for key, value in section.items() if key != "format_version"}
    for name in ("layer_self_attention", "self_attention", "cross_attention"):
        values[name] = LayerConfig(**values[name])
    values["num_target_layers"] = tuple(values["num_target_layers"])
    values["without"] = tuple(values.get("without", ()))
    values["acceptance"] = _rates(values.get("acceptance", ()))
    values["further_acceptance"] = tuple(map(_rates, values.get("further_acceptance", ())))
    if values.get("target") is not None:
        values["target"] = TargetIdentity(**values["target"])
    return DrafterConfig(**values)


def _rates(lists: Sequence[Sequence[float]]) -> Rates:
    return tuple(tuple(by_rank) for by_rank in lists)


def recorded_config(config_json: Mapping[str, Any]) -> DrafterConfig:
    """The recorded config of one of our checkpoints; checks the format version."""
    section = config_json[SECTION]
    if not isinstance(section, Mapping):
        raise CorruptCheckpointError(f"The {SECTION} section of {CONFIG_FILE} must be an object.")
    version = section.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"Checkpoint format {version} is not {FORMAT_VERSION}; upgrade moaspec."
        )
    return config_from_json(section)


def infer_config(
    config_json: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    target: TargetIdentity,
    context: Any,
) -> DrafterConfig:
    """Sizes of a published checkpoint, raw or converted, from its tensors.

    Every attention has the target's number of query heads; head dim is floor(width / heads).
    """
    if "layer_self_attention.self_attn.q_proj.weight" not in tensors:
        raise CorruptCheckpointError(
            "The checkpoint has no layer self-attention (tensors layer_self_attention.*)."
        )
    _check_published_target(config_json, target)
    num_heads = config_json.get("num_attention_heads", context.num_attention_heads)
    if not isinstance(num_heads, int) or num_heads < 1:
        raise CorruptCheckpointError(
            f"num_attention_heads in {CONFIG_FILE} must be a whole number of 1 or more, got "
            f"{num_heads!r}."
        )
    rope_parameters = text_rope(context)
    lsa, sa, ca = (
        _infer_layer(tensors, name, num_heads)
        for name in ("layer_self_attention", "self_attention", "cross_attention")
    )
    return DrafterConfig(
        hidden_size=sa.hidden_size,
        kv_size=lsa.hidden_size,
        layer_self_attention=lsa,
        self_attention=sa,
        cross_attention=ca,
        rms_norm_eps=float(config_json.get("rms_norm_eps", norm_eps(context))),
        hidden_act=str(config_json.get("hidden_act") or activation_name(context)),
        rope_theta=float(rope_parameters["rope_theta"]),
        rope_parameters=rope_parameters,
        max_position_embeddings=int(context.max_position_embeddings),
        num_target_layers=(0,),
    )


def _check_published_target(config_json: Mapping[str, Any], target: TargetIdentity) -> None:
    """Refuse another target by its config: all of it is in a raw checkpoint, parts in others."""
    recorded = {
        "num_hidden_layers": target.num_layers,
        "num_key_value_heads": target.num_kv_heads,
        "vocab_size": target.vocab_size,
    }
    wrong = [
        f"{name} is {config_json[name]} in the checkpoint and {expected} in the target"
        for name, expected in recorded.items()
        if config_json.get(name, expected) != expected
    ]
    if wrong:
        raise MismatchError(f"The drafter was made for another target: {'; '.join(wrong)}.")


def _infer_layer(tensors: Mapping[str, Tensor], name: str, num_heads: int) -> LayerConfig:
    q_rows = tensors[f"{name}.self_attn.q_proj.weight"].shape[0]
    head_dim = q_rows // num_heads
    return LayerConfig(
        hidden_size=tensors[f"{name}.input_layernorm.weight"].shape[0],
        num_heads=num_heads,
        num_kv_heads=tensors[f"{name}.self_attn.k_proj.weight"].shape[0] // max(head_dim, 1),
        head_dim=head_dim,
        intermediate_size=tensors[f"{name}.mlp.gate_proj.weight"].shape[0],
        qkv_bias=f"{name}.self_attn.q_proj.bias" in tensors,
        o_bias=f"{name}.self_attn.o_proj.bias" in tensors,
        mlp_bias=f"{name}.mlp.gate_proj.bias" in tensors,
    )


def check_target(
    config: DrafterConfig,
    draft_token_ids: Tensor | None,
    target: TargetIdentity,
    *,
    where: str,
    name: str | None = None,
) -> None:
    """Refuse a checkpoint whose sizes, recorded identity or draft vocabulary do not fit.

    Args:
        name: of the recorded target, for the message.
    """
    recorded = config.target
    info: dict[str, tuple[Any, Any]] = {
        "hidden size": (config.hidden_size, target.hidden_size),
        "key and value size K": (config.kv_size, target.kv_size),
    }
    if recorded is not None:
        info |= {
            field.name: (getattr(recorded, field.name), getattr(target, field.name))
            for field in dataclasses.fields(TargetIdentity)
            if field.name != "adapter"  # which changes no size
        }
    if draft_token_ids is not None:
        _check_draft_tokens(draft_token_ids)
        info["largest draft token id fits"] = (
            int(draft_token_ids.max()) < target.vocab_size,
            True,
        )
    if max(config.num_target_layers) > target.num_layers:
        info["num_target_layers"] = (max(config.num_target_layers), f"<= {target.num_layers}")
    wrong = [
        f"{name} is {got} in the drafter and {expected} in the target"
        for name, (got, expected) in info.items()
        if got != expected and None not in (got, expected)
    ]
    if wrong:
        raise MismatchError(
            f"The {where} was made for another target: {'; '.join(wrong)}. "
            f"Use the target it was trained for{f' ({name})' if name else ''}, or train a drafter "
            "for this one."
        )


def _check_draft_tokens(ids: Tensor) -> None:
    if ids.ndim != 1 or not len(ids) or ids.dtype != torch.int64 or int(ids.min()) < 0:
        raise CorruptCheckpointError(
            f"The draft vocabulary ({DRAFT_TOKENS}) must be a list of token ids (int64, 0 or more)."
        )
