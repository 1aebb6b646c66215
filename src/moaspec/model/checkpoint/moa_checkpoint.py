"""Drafter checkpoints: published tensor names on disk, our modules in memory.

A checkpoint is a directory with `config.json` and `model.safetensors`. Three kinds are read:

- ours: `config.json` has a `moaspec` section with every size, the target's identity and N;
- published raw: `config.json` is the target's own;
- published, converted for vLLM: `model_type` is `moa_spec`, layer and KV-head counts are missing.

Sizes always come from the tensors; `config.json` adds only what tensors cannot tell.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moaspec.errors import CheckpointError, CorruptCheckpointError, MismatchError
from moaspec.model.checkpoint.directory import CONFIG_FILE, read_config
from moaspec.model.checkpoint.weight_files import read_tensors, write_config, write_weights
from moaspec.model.drafter_config import (
    DrafterConfig,
    LayerConfig,
    Rates,
    TargetIdentity,
    activation_name,
    text_rope,
)
from moaspec.model.head_moment import is_moment
from moaspec.model.moa import MoADrafter

DRAFT_TOKENS = "draft_token_ids"
HEAD_MOMENT = "head_moment"
BESIDE_WEIGHTS = (DRAFT_TOKENS, HEAD_MOMENT)
FORMAT_VERSION = 1
SECTION = "moaspec"
"""Of `config.json`, where a checkpoint of ours says what it is."""

_RENAMED = (
    # (published prefix, module path); the first that matches wins.
    ("layer_self_attention.self_attn.k_proj.", "encoder.layer_self_attention.key_value.k_proj."),
    ("layer_self_attention.self_attn.v_proj.", "encoder.layer_self_attention.key_value.v_proj."),
    ("layer_self_attention.", "encoder.layer_self_attention."),
    ("self_attention.self_attn.k_proj.", "decoder.self_attention.key_value.k_proj."),
    ("self_attention.self_attn.v_proj.", "decoder.self_attention.key_value.v_proj."),
    ("self_attention.", "decoder.self_attention."),
    ("cross_attention.self_attn.k_proj.", "encoder.memory_key_value.k_proj."),
    ("cross_attention.self_attn.v_proj.", "encoder.memory_key_value.v_proj."),
    ("cross_attention.", "decoder.cross_attention."),
    ("Ekv2E.", "encoder.projection."),
    ("exits.", "exits."),
)
_SHARED_NORM = "encoder.memory_norm."
_INCONSISTENCIES = (
    CorruptCheckpointError,
    LookupError,
    ValueError,
    TypeError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
)
"""How impossible sizes and settings show themselves when modules are built from them."""


def to_module_name(published: str) -> str:
    """Our module path of a published tensor name."""
    for prefix, path in _RENAMED:
        if published.startswith(prefix):
            return path + published.removeprefix(prefix)
    raise CorruptCheckpointError(f"Unexpected tensor {published!r} in the checkpoint.")


def to_published_name(module_name: str) -> str:
    """Published tensor name of one of our parameters."""
    for prefix, path in _RENAMED:
        if module_name.startswith(path):
            return prefix + module_name.removeprefix(path)
    raise AssertionError(module_name)


def save_drafter(
    drafter: MoADrafter,
    directory: str | Path,
    *,
    dtype: torch.dtype | None = None,
    training: Mapping[str, Any] | None = None,
    shard_bytes: int = 0,
) -> None:
    """Write a checkpoint that `load_checkpoint` reads back.

    Args:
        drafter: what to save.
        directory: created when missing; an existing checkpoint in it is replaced.
        dtype: dtype of the stored weights; None keeps them as they are.
        training: facts about the training run, stored as they are.
        shard_bytes: largest file of weights; 0 for one file. Several get the index that
            transformers' sharded checkpoints have.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = published_tensors(drafter, dtype)
    if drafter.draft_token_ids is not None:
        tensors[DRAFT_TOKENS] = drafter.draft_token_ids.cpu()
    if drafter.head_moment is not None:
        tensors[HEAD_MOMENT] = drafter.head_moment
    section = {"format_version": FORMAT_VERSION, **dataclasses.asdict(drafter.config)}
    config = {
        "model_type": "moa_spec",
        "architectures": ["MoADrafter"],
        SECTION: section,
        "training": dict(training or {}),
    }
    write_weights(directory, tensors, shard_bytes)
    write_config(directory, config)


def published_tensors(drafter: MoADrafter, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """All weights under their published names, on the CPU."""
    return {
        to_published_name(name): parameter.detach().to(dtype or parameter.dtype).contiguous().cpu()
        for name, parameter in drafter.named_parameters(remove_duplicate=False)
        if not name.startswith(_SHARED_NORM)
    }


def load_checkpoint(directory: str | Path, target: TargetIdentity, context: Any) -> MoADrafter:
    """Load a drafter for a target.

    Args:
        directory: the checkpoint.
        target: identity of the target that it will draft for.
        context: the target's transformers config; fills what published checkpoints do not record.

    Returns:
        The drafter in evaluation mode, weights in the stored dtype.

    Raises:
        CorruptCheckpointError: unreadable, incomplete, or of impossible sizes.
        MismatchError: it belongs to another target.
    """
    config_json, tensors = read_config(directory), read_tensors(directory)
    draft_token_ids, moment_EE = tensors.pop(DRAFT_TOKENS, None), tensors.pop(HEAD_MOMENT, None)
    with consistent(directory):
        config = _config_of(config_json, tensors, target, context)
        check_target(config, draft_token_ids, target, where=f"drafter at {directory}")
        _check_shapes(config, tensors)
        drafter = MoADrafter(config, draft_token_ids)
        _fill(drafter, tensors)
        _check_moment(moment_EE, config.hidden_size)
    drafter.head_moment = moment_EE
    return drafter.eval().requires_grad_(requires_grad=False)


@contextmanager
def consistent(directory: str | Path) -> Iterator[None]:
    """Whatever does not fit together in a checkpoint, as one error that says where it is.

    Raises:
        CorruptCheckpointError: tensors are missing or odd, sizes or settings impossible.
    """
    try:
        yield
    except _INCONSISTENCIES as error:
        raise CorruptCheckpointError(
            f"The checkpoint at {directory} is incomplete or inconsistent: {error}"
        ) from error


def check_whole(
    directory: str | Path, config_json: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Refuse what is not all of a drafter, as far as that can be told without its target.

    A published checkpoint's sizes take its target to be known; of those only the names are checked.

    Raises:
        CheckpointError: another format version.
        CorruptCheckpointError: tensors are missing, too many or of other sizes.
    """
    weights = {name: tensor for name, tensor in tensors.items() if name not in BESIDE_WEIGHTS}
    with consistent(directory):
        if SECTION in config_json:
            _check_shapes(_recorded_config(config_json), weights)
            return
        known = {to_module_name(name) for name in weights}
        missing = [ours for _, ours in _RENAMED[:-1] if not any(n.startswith(ours) for n in known)]
        if missing:
            names = ", ".join(to_published_name(f"{one}*") for one in missing)
            raise CorruptCheckpointError(f"Tensors are missing in the checkpoint: {names}.")


def check_target(
    config: DrafterConfig, draft_token_ids: Tensor | None, target: TargetIdentity, *, where: str
) -> None:
    """Refuse a checkpoint whose sizes, recorded identity or draft vocabulary do not fit."""
    recorded = config.target
    facts: dict[str, tuple[Any, Any]] = {
        "hidden size": (config.hidden_size, target.hidden_size),
        "key and value size K": (config.kv_size, target.kv_size),
    }
    if recorded is not None:
        facts |= {
            field.name: (getattr(recorded, field.name), getattr(target, field.name))
            for field in dataclasses.fields(TargetIdentity)
        }
    if draft_token_ids is not None:
        _check_draft_tokens(draft_token_ids)
        facts["largest draft token id fits"] = (
            int(draft_token_ids.max()) < target.vocab_size,
            True,
        )
    if max(config.num_target_layers) > target.num_layers:
        facts["num_target_layers"] = (max(config.num_target_layers), f"<= {target.num_layers}")
    wrong = [
        f"{name} is {got} in the drafter and {expected} in the target"
        for name, (got, expected) in facts.items()
        if got != expected and None not in (got, expected)
    ]
    if wrong:
        raise MismatchError(
            f"The {where} was made for another target: {'; '.join(wrong)}. "
            "Use the target it was trained for, or train a drafter for this one."
        )


def _check_draft_tokens(ids: Tensor) -> None:
    if ids.ndim != 1 or not len(ids) or ids.dtype != torch.int64 or int(ids.min()) < 0:
        raise CorruptCheckpointError(
            f"The draft vocabulary ({DRAFT_TOKENS}) must be a list of token ids (int64, 0 or more)."
        )


def _check_moment(moment_EE: Tensor | None, size: int) -> None:
    if moment_EE is None:
        return
    fits = moment_EE.shape == (size, size) and moment_EE.is_floating_point()
    if not fits or not bool(moment_EE.isfinite().all()) or not is_moment(moment_EE):
        raise CorruptCheckpointError(
            f"{HEAD_MOMENT} must be the mean of products of {size} numbers with one another "
            f"(positive definite), which this {tuple(moment_EE.shape)} tensor of {moment_EE.dtype} "
            "is not. Export the drafter again, or leave the tensor out: the "
            "head is then not rounded."
        )


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


def _config_of(
    config_json: dict[str, Any],
    tensors: Mapping[str, Tensor],
    target: TargetIdentity,
    context: Any,
) -> DrafterConfig:
    if SECTION in config_json:
        return _recorded_config(config_json)
    return infer_config(config_json, tensors, target, context)


def _recorded_config(config_json: Mapping[str, Any]) -> DrafterConfig:
    """What a checkpoint of ours says of itself."""
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
        rms_norm_eps=float(config_json.get("rms_norm_eps", context.rms_norm_eps)),
        hidden_act=str(config_json.get("hidden_act") or activation_name(context)),
        rope_theta=float(rope_parameters["rope_theta"]),
        rope_parameters=rope_parameters,
        max_position_embeddings=int(context.max_position_embeddings),
        num_target_layers=(0,),
    )


def _check_published_target(config_json: Mapping[str, Any], target: TargetIdentity) -> None:
    """A raw checkpoint's config is its target's own; a converted one has lost some of it."""
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


def _check_shapes(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Compare the tensors with what the config asks for, before any memory is spent on that."""
    with torch.device("meta"):
        skeleton = MoADrafter(config)
    expected = {
        name: parameter
        for name, parameter in skeleton.named_parameters(remove_duplicate=False)
        if not name.startswith(_SHARED_NORM)
    }
    state = {to_module_name(name): tensor for name, tensor in tensors.items()}
    for kind, odd in (
        ("missing", expected.keys() - state.keys()),
        ("unexpected", state.keys() - expected.keys()),
    ):
        if odd:
            names = ", ".join(sorted(map(to_published_name, odd)))
            raise CorruptCheckpointError(f"Tensors are {kind} in the checkpoint: {names}.")
    for name, parameter in expected.items():
        if state[name].shape != parameter.shape:
            raise CorruptCheckpointError(
                f"Tensor {to_published_name(name)!r} has shape {tuple(state[name].shape)}, and "
                f"the drafter's sizes ask for {tuple(parameter.shape)}."
            )
        if not state[name].is_floating_point():
            raise CorruptCheckpointError(
                f"Tensor {to_published_name(name)!r} holds {state[name].dtype}, not weights. "
                "Convert the checkpoint."
            )


def _fill(drafter: MoADrafter, tensors: Mapping[str, Tensor]) -> None:
    """Let the tensors, which `_check_shapes` found to fit, be the modules' weights.

    They stay in the mapped file, so the system may drop pages that are not in use.
    """
    dtype = next(iter(tensors.values())).dtype
    state = {to_module_name(name): tensor.to(dtype) for name, tensor in tensors.items()}
    shared = {
        _SHARED_NORM + name.removeprefix("decoder.cross_attention.input_layernorm."): tensor
        for name, tensor in state.items()
        if name.startswith("decoder.cross_attention.input_layernorm.")
    }
    drafter.to(dtype)
    drafter.load_state_dict(state | shared, assign=True)
