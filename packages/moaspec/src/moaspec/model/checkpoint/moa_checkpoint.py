"""Drafter checkpoints: published tensor names on disk, our modules in memory.

A checkpoint is a directory with `config.json` and `model.safetensors`. Three kinds are read:

- ours: `config.json` has a `moaspec` section with every size, the target's identity and N;
- published raw: `config.json` is the target's own;
- published, converted for vLLM: `model_type` is `moa_spec`, layer and KV-head counts are missing.

Sizes always come from the tensors; `config.json` adds only what tensors cannot tell.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moaspec.model.checkpoint.eight_bits import quantised_tensors, widened_tensors
from moaspec.model.checkpoint.moa_config import (
    FORMAT_VERSION,
    SECTION,
    check_target,
    infer_config,
    recorded_config,
)
from moaspec.model.checkpoint.tensor_names import (
    BESIDE_WEIGHTS,
    DRAFT_TOKENS,
    HEAD_MOMENT,
    PUBLISHED,
    SHARED_NORM,
    to_module_name,
    to_published_name,
)
from moaspec.model.checkpoint.weight_files import read_tensors, write_config, write_weights
from moaspec.model.moa import MoADrafter, is_moment
from moaspec_core.checkpoint.directory import BASELINE_SECTION, read_config
from moaspec_core.checkpoint.drafter_config import DrafterConfig, TargetIdentity
from moaspec_core.checkpoint.speculators_fields import (
    TYPE,
    Verifier,
    read_verifier,
    speculators_fields,
)
from moaspec_core.errors import CorruptCheckpointError, InputError

ON_DEVICE = ("decoder.", "exits.")
"""Beginnings of the names of weights that run on a device; the encoder runs on the server."""

_INCONSISTENCIES = (
    CorruptCheckpointError,
    LookupError,
    ValueError,
    TypeError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
)
"""Errors of modules that are built with impossible sizes or settings."""


def save_drafter(
    drafter: MoADrafter,
    directory: str | Path,
    *,
    dtype: torch.dtype | None = None,
    training: Mapping[str, Any] | None = None,
    verifier: Verifier | None = None,
    shard_bytes: int = 0,
    int8: bool = False,
) -> None:
    """Write a checkpoint that `load_checkpoint` reads back.

    Args:
        directory: created when missing; an existing checkpoint in it is replaced.
        dtype: dtype of the stored weights; None keeps them as they are.
        int8: matrices are stored in eight bits, half of bf16. Other programs cannot read them.
        training: data of the training run, stored as it is.
        verifier: the target, recorded as the package speculators does; None records no name.
        shard_bytes: largest file of weights; 0 for one file. Several get the index that
            transformers' sharded checkpoints have.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = published_tensors(drafter, dtype)
    if int8:
        tensors = {
            name: tensor if tensor.ndim == 2 else tensor.bfloat16()
            for name, tensor in tensors.items()
        }
        tensors = quantised_tensors(tensors)
    if drafter.draft_token_ids is not None:
        tensors[DRAFT_TOKENS] = drafter.draft_token_ids.cpu()
    if drafter.head_moment is not None:
        tensors[HEAD_MOMENT] = _small(drafter.head_moment) if int8 else drafter.head_moment
    section = {"format_version": FORMAT_VERSION, **dataclasses.asdict(drafter.config)}
    config = {
        "model_type": "moa_spec",
        "architectures": ["MoADrafter"],
        **speculators_fields(verifier),
        SECTION: section,
        "training": dict(training or {}),
    }
    write_weights(directory, tensors, shard_bytes)
    write_config(directory, config)


def published_tensors(drafter: MoADrafter, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """All weights under their published names, on the CPU."""
    return {
        name: parameter.detach().to(dtype or parameter.dtype).contiguous().cpu()
        for name, parameter in published_parameters(drafter).items()
    }


def device_part(drafter: MoADrafter) -> dict[str, Tensor]:
    """The weights that run on a device, in bf16 under their published names, on the CPU."""
    return {
        name: tensor
        for name, tensor in published_tensors(drafter, torch.bfloat16).items()
        if to_module_name(name).startswith(ON_DEVICE)
    }


def device_part_bytes(config: DrafterConfig) -> int:
    """Bytes of the tensors of `device_part`."""
    with torch.device("meta"):
        decoder = MoADrafter(config)
    parts = (one for name, one in decoder.named_parameters() if name.startswith(ON_DEVICE))
    return sum(part.numel() * torch.bfloat16.itemsize for part in parts)


def published_parameters(drafter: MoADrafter) -> dict[str, Tensor]:
    """The parameters themselves under their published names."""
    return {
        to_published_name(name): parameter
        for name, parameter in drafter.named_parameters(remove_duplicate=False)
        if not name.startswith(SHARED_NORM)
    }


def load_checkpoint(directory: str | Path, target: TargetIdentity, context: Any) -> MoADrafter:
    """Load a drafter for a target.

    Args:
        context: the target's transformers config; fills what published checkpoints do not record.

    Returns:
        The drafter in evaluation mode, weights in the stored dtype, bf16 for those of eight bits.

    Raises:
        CorruptCheckpointError: unreadable, incomplete, or of impossible sizes.
        MismatchError: it belongs to another target.
        InputError: it is a baseline, or of another type of speculators.
    """
    config_json = read_config(directory)
    require_own_type(directory, config_json)
    if BASELINE_SECTION in config_json:
        raise InputError(
            f"{directory} holds a baseline drafter; only a Mixture-of-Attentions drafter can be "
            "converted, exported, trained further, used in vLLM or loaded by load_drafter. "
            "`moaspec generate --drafter` takes baselines too."
        )
    tensors, verifier = read_tensors(directory), None
    draft_token_ids, moment_EE = tensors.pop(DRAFT_TOKENS, None), tensors.pop(HEAD_MOMENT, None)
    with consistent(directory):
        tensors = widened_tensors(tensors)
        if SECTION in config_json:
            config = recorded_config(config_json)
            verifier = read_verifier(config_json)
        else:
            config = infer_config(config_json, tensors, target, context)
        name = None if verifier is None else verifier.name
        check_target(config, draft_token_ids, target, where=f"drafter at {directory}", name=name)
        _check_shapes(config, tensors)
        drafter = MoADrafter(config, draft_token_ids)
        _fill(drafter, tensors)
        moment_EE = _whole(moment_EE, config.hidden_size)
        _check_moment(moment_EE, config.hidden_size)
    drafter.head_moment = moment_EE
    return drafter.eval().requires_grad_(requires_grad=False)


def require_own_type(directory: str | Path, config_json: Mapping[str, Any]) -> None:
    """InputError for a drafter that was saved by speculators and is none of ours."""
    kind = config_json.get(TYPE)
    if kind is not None and SECTION not in config_json and BASELINE_SECTION not in config_json:
        raise InputError(
            f"{directory} holds a drafter of the type {kind!r} of speculators, with which vLLM "
            "drafts and moaspec does not. Train a drafter here, or take it to vLLM."
        )


@contextmanager
def consistent(directory: str | Path) -> Iterator[None]:
    """Turn errors of an inconsistent checkpoint into a CorruptCheckpointError with its path."""
    try:
        yield
    except _INCONSISTENCIES as error:
        raise CorruptCheckpointError(
            f"The checkpoint at {directory} is incomplete or inconsistent: {error}"
        ) from error


def check_whole(
    directory: str | Path, config_json: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Refuse an incomplete drafter, as far as that can be checked without its target.

    Sizes of a published checkpoint depend on its target, so only its tensors' names are checked.

    Raises:
        CheckpointError: another format version.
        CorruptCheckpointError: tensors are missing, too many or of other sizes.
    """
    weights = {name: tensor for name, tensor in tensors.items() if name not in BESIDE_WEIGHTS}
    with consistent(directory):
        weights = widened_tensors(weights)
        if SECTION in config_json:
            _check_shapes(recorded_config(config_json), weights)
            read_verifier(config_json)
            return
        known = {to_module_name(name) for name in weights}
        missing = [ours for _, ours in PUBLISHED if not any(n.startswith(ours) for n in known)]
        if missing:
            names = ", ".join(to_published_name(f"{one}*") for one in missing)
            raise CorruptCheckpointError(f"Tensors are missing in the checkpoint: {names}.")


def _small(moment_EE: Tensor) -> Tensor:
    """The lower triangle in float16, a quarter of the bytes; the moment where that spoils it."""
    size = len(moment_EE)
    triangle = moment_EE[*torch.tril_indices(size, size)].half()
    whole_EE = _whole(triangle, size)
    return triangle if whole_EE is not None and is_moment(whole_EE) else moment_EE


def _whole(moment: Tensor | None, size: int) -> Tensor | None:
    """The moment of a checkpoint as a matrix in float32; what is no triangle of it stays."""
    if moment is None or moment.shape != (size * (size + 1) // 2,):
        return moment
    whole_EE = torch.zeros(size, size)
    whole_EE[*torch.tril_indices(size, size)] = moment.float()
    return whole_EE + whole_EE.tril(-1).T


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


def _check_shapes(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    """Compare the tensors with the config's sizes, before modules take memory."""
    with torch.device("meta"):
        expected = published_parameters(MoADrafter(config))
    for kind, odd in (
        ("missing", expected.keys() - tensors.keys()),
        ("unexpected", tensors.keys() - expected.keys()),
    ):
        if odd:
            names = ", ".join(sorted(odd))
            raise CorruptCheckpointError(f"Tensors are {kind} in the checkpoint: {names}.")
    for name, parameter in expected.items():
        if tensors[name].shape != parameter.shape:
            raise CorruptCheckpointError(
                f"Tensor {name!r} has shape {tuple(tensors[name].shape)}, and "
                f"the drafter's sizes ask for {tuple(parameter.shape)}."
            )
        if not tensors[name].is_floating_point():
            raise CorruptCheckpointError(
                f"Tensor {name!r} holds {tensors[name].dtype}, not weights. Convert the checkpoint."
            )


def _fill(drafter: MoADrafter, tensors: Mapping[str, Tensor]) -> None:
    """Use the tensors, which `_check_shapes` has checked, as the modules' weights.

    They stay in the mapped file, so the system may drop pages that are not in use.
    """
    dtype = next(iter(tensors.values())).dtype
    state = {to_module_name(name): tensor.to(dtype) for name, tensor in tensors.items()}
    shared = {
        SHARED_NORM + name.removeprefix("decoder.cross_attention.input_layernorm."): tensor
        for name, tensor in state.items()
        if name.startswith("decoder.cross_attention.input_layernorm.")
    }
    drafter.to(dtype)
    drafter.load_state_dict(state | shared, assign=True)


def fingerprint(drafter: MoADrafter) -> str:
    """Hash a drafter's weights; float32 and bfloat16 copies have the same hash.

    Returns:
        SHA-256, hexadecimal, over names, shapes and values rounded to bfloat16, of both halves.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(drafter.state_dict().items()):
        rounded = tensor.detach().to(device="cpu", dtype=torch.bfloat16).contiguous()
        digest.update(f"{name}\0{tuple(tensor.shape)}\0".encode())
        digest.update(rounded.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()
