"""Drafter checkpoints: published tensor names on disk, our modules in memory.

A checkpoint is a directory with `config.json` and `model.safetensors`. Three kinds are read:

- ours: `config.json` has a `moaspec` section with every size, the target's identity and N;
- published raw: `config.json` is the target's own;
- published, converted for vLLM: `model_type` is `moa_spec`, layer and KV-head counts are missing.

Sizes always come from the tensors; `config.json` adds only what tensors cannot tell.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moaspec.errors import CheckpointError, CorruptCheckpointError, MismatchError
from moaspec.model.config import (
    DrafterConfig,
    LayerConfig,
    TargetIdentity,
    activation_name,
    text_rope,
)
from moaspec.model.drafter import MoADrafter

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DRAFT_TOKENS = "draft_token_ids"
FORMAT_VERSION = 1
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NAMES = tuple(str(dtype).removeprefix("torch.") for dtype in WEIGHT_DTYPES)

_RENAMED = (
    # (published prefix, module path); the first that matches wins.
    ("layer_self_attention.self_attn.k_proj.", "encoder.layer_self_attention.key_value.k_proj."),
    ("layer_self_attention.self_attn.v_proj.", "encoder.layer_self_attention.key_value.v_proj."),
    ("layer_self_attention.", "encoder.layer_self_attention."),
    ("self_attention.self_attn.k_proj.", "speaker.self_attention.key_value.k_proj."),
    ("self_attention.self_attn.v_proj.", "speaker.self_attention.key_value.v_proj."),
    ("self_attention.", "speaker.self_attention."),
    ("cross_attention.self_attn.k_proj.", "encoder.memory_key_value.k_proj."),
    ("cross_attention.self_attn.v_proj.", "encoder.memory_key_value.v_proj."),
    ("cross_attention.", "speaker.cross_attention."),
    ("Ekv2E.", "encoder.projection."),
    ("exits.", "exits."),
)
_SHARED_NORM = "encoder.memory_norm."


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
    section = {"format_version": FORMAT_VERSION, **dataclasses.asdict(drafter.config)}
    config = {
        "model_type": "moa_spec",
        "architectures": ["MoADrafter"],
        "moaspec": section,
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


def write_config(directory: Path, config: Mapping[str, Any]) -> None:
    """Write `config.json`."""
    _replace(directory / CONFIG_FILE, lambda path: path.write_text(_json(config)))


def write_weights(directory: Path, tensors: Mapping[str, Tensor], shard_bytes: int = 0) -> None:
    """Write tensors as `model.safetensors`, or as shards with an index."""
    split = split_torch_state_dict_into_shards(dict(tensors), max_shard_size=shard_bytes or 2**62)
    for name, names in split.filename_to_tensors.items():
        shard = {key: tensors[key] for key in names}
        _replace(directory / name, partial(save_file, shard, metadata={"format": "pt"}))
    kept = set(split.filename_to_tensors)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        _replace(directory / INDEX_FILE, lambda path: path.write_text(_json(index)))
        kept.add(INDEX_FILE)
    for old in [*directory.glob("model*.safetensors"), directory / INDEX_FILE]:
        if old.name not in kept:
            old.unlink(missing_ok=True)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file so that a reader finds the old one or the new one, whole."""
    scratch = path.with_name(f".{path.name}.partial")
    write(scratch)
    scratch.replace(path)


def read_config(directory: str | Path) -> dict[str, Any]:
    """The checkpoint's `config.json`.

    Raises:
        CheckpointError: no such file.
        CorruptCheckpointError: it is not a JSON object.
    """
    path = Path(directory) / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"No drafter checkpoint at {directory}: {path} is missing."
        ) from error
    except (OSError, ValueError) as error:
        raise CorruptCheckpointError(f"Cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise CorruptCheckpointError(f"{path} must hold a JSON object.")
    return config


def read_tensors(directory: str | Path) -> dict[str, Tensor]:
    """All tensors under their published names.

    Raises:
        CheckpointError: no such file.
        CorruptCheckpointError: truncated, not safetensors, or a value is not finite.
    """
    tensors: dict[str, Tensor] = {}
    for path in weight_files(Path(directory)):
        tensors |= _read_file(path)
    return tensors


def weight_files(directory: Path) -> list[Path]:
    """The files of a checkpoint's weights: one, or those that its index names.

    Raises:
        CheckpointError: one is missing.
        CorruptCheckpointError: the index cannot be read.
    """
    index, files = directory / INDEX_FILE, [directory / WEIGHTS_FILE]
    if index.exists():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise CorruptCheckpointError(f"Cannot read {index}: {error}") from error
        # Names only: an index must not lead out of its directory.
        files = [directory / Path(str(name)).name for name in sorted(names)]
    for path in files:
        if not path.exists():
            raise CheckpointError(f"No drafter checkpoint at {directory}: {path} is missing.")
    return files


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CorruptCheckpointError(
            f"{path} is truncated or not a safetensors file ({error}). Fetch it again."
        ) from error
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            _check_values(tensor, f"{path}: tensor {name!r}")
    return tensors


def _check_values(tensor: Tensor, what: str) -> None:
    if tensor.dtype not in WEIGHT_DTYPES:
        raise CorruptCheckpointError(
            f"{what} is {tensor.dtype}, and weights must be one of {', '.join(_NAMES)}. Convert "
            "the checkpoint."
        )
    if not bool(torch.isfinite(tensor).all()):
        raise CorruptCheckpointError(f"{what} has NaN or infinite values.")


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
    draft_token_ids = tensors.pop(DRAFT_TOKENS, None)
    try:
        config = _config_of(config_json, tensors, target, context)
        check_target(config, draft_token_ids, target, where=f"drafter at {directory}")
        _check_shapes(config, tensors)
        drafter = MoADrafter(config, draft_token_ids)
        _fill(drafter, tensors)
    # Impossible sizes and settings show themselves in many ways when modules are built from them.
    except (LookupError, ValueError, TypeError, ArithmeticError, RuntimeError) as error:
        raise CorruptCheckpointError(
            f"The checkpoint at {directory} is incomplete or inconsistent: {error}"
        ) from error
    return drafter.eval().requires_grad_(requires_grad=False)


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


def config_from_json(section: Mapping[str, Any]) -> DrafterConfig:
    """Read the `moaspec` section that `save_drafter` writes."""
    values = {key: value for key, value in section.items() if key != "format_version"}
    for name in ("layer_self_attention", "self_attention", "cross_attention"):
        values[name] = LayerConfig(**values[name])
    values["num_target_layers"] = tuple(values["num_target_layers"])
    values["without"] = tuple(values.get("without", ()))
    values["acceptance"] = tuple(tuple(rates) for rates in values.get("acceptance", ()))
    if values.get("target") is not None:
        values["target"] = TargetIdentity(**values["target"])
    return DrafterConfig(**values)


def _config_of(
    config_json: dict[str, Any],
    tensors: Mapping[str, Tensor],
    target: TargetIdentity,
    context: Any,
) -> DrafterConfig:
    if "moaspec" in config_json:
        if not isinstance(config_json["moaspec"], Mapping):
            raise CorruptCheckpointError(f"The moaspec section of {CONFIG_FILE} must be an object.")
        version = config_json["moaspec"].get("format_version")
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"Checkpoint format {version} is not {FORMAT_VERSION}; upgrade moaspec."
            )
        return config_from_json(config_json["moaspec"])
    return infer_config(config_json, tensors, target, context)


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


def _fill(drafter: MoADrafter, tensors: Mapping[str, Tensor]) -> None:
    """Put the tensors, which `_check_shapes` found to fit, into the modules in their dtype."""
    state = {to_module_name(name): tensor for name, tensor in tensors.items()}
    shared = {
        _SHARED_NORM + name.removeprefix("speaker.cross_attention.input_layernorm."): tensor
        for name, tensor in state.items()
        if name.startswith("speaker.cross_attention.input_layernorm.")
    }
    drafter.to(next(iter(tensors.values())).dtype)
    drafter.load_state_dict(state | shared)
