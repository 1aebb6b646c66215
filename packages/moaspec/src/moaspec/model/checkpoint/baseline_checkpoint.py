"""Configs and checkpoints of the baseline drafters."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moaspec.model.baselines import KINDS, Baseline, EagleDrafter, StackConfig
from moaspec.model.checkpoint.moa_checkpoint import check_whole, consistent
from moaspec.model.checkpoint.tensor_names import DRAFT_TOKENS
from moaspec.model.checkpoint.weight_files import (
    read_tensors,
    require_enough,
    write_config,
    write_weights,
)
from moaspec_core.checkpoint.directory import BASELINE_SECTION, read_config
from moaspec_core.checkpoint.drafter_config import LayerConfig, TargetIdentity
from moaspec_core.checkpoint.speculators_fields import (
    Verifier,
    read_verifier,
    speculators_fields,
)
from moaspec_core.errors import MismatchError

_EAGLE_NAMES = (
    # (published, ours); the first that matches wins.
    ("spec_model.self_attn.k_proj.", "layer.key_value.k_proj."),
    ("spec_model.self_attn.v_proj.", "layer.key_value.v_proj."),
    ("spec_model.", "layer."),
    ("spec_model_fc.", "fc."),
)


def save_baseline(
    drafter: Baseline,
    directory: str | Path,
    *,
    dtype: torch.dtype | None = None,
    training: Mapping[str, Any] | None = None,
    verifier: Verifier | None = None,
    shard_bytes: int = 0,
) -> None:
    """Write a checkpoint that `load_baseline` reads; arguments as those of `save_drafter`."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        _renamed(name, drafter.kind, 1, 0): parameter.detach().to(dtype or parameter.dtype).cpu()
        for name, parameter in drafter.named_parameters()
    }
    if drafter.draft_token_ids is not None:
        tensors[DRAFT_TOKENS] = drafter.draft_token_ids.cpu()
    write_weights(directory, tensors, shard_bytes)
    section = {"kind": drafter.kind, **dataclasses.asdict(drafter.config)}
    write_config(
        directory,
        {
            "model_type": BASELINE_SECTION,
            **speculators_fields(verifier, drafter.kind),
            BASELINE_SECTION: section,
            "training": dict(training or {}),
        },
    )


def is_baseline(directory: str | Path) -> bool:
    """Whether the checkpoint has a baseline drafter."""
    return BASELINE_SECTION in read_config(directory)


def read_whole(directory: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`config.json` and tensors of a complete drafter of any kind.

    Raises:
        CheckpointError: there is no checkpoint.
        CorruptCheckpointError: unreadable, incomplete, or no drafter.
    """
    config, tensors = read_config(directory), read_tensors(directory)
    if BASELINE_SECTION in config:
        load_baseline(directory)
    else:
        check_whole(directory, config, tensors)
    return config, tensors


def load_baseline(directory: str | Path, target: TargetIdentity | None = None) -> Baseline:
    """Load a baseline drafter in evaluation mode, weights in the stored dtype.

    Args:
        target: identity of the target that it will draft for; None does not compare it.

    Raises:
        CheckpointError: there is no checkpoint.
        CorruptCheckpointError: unreadable or incomplete.
        MismatchError: it belongs to another target.
    """
    tensors = read_tensors(directory)
    draft_token_ids = tensors.pop(DRAFT_TOKENS, None)
    with consistent(directory):
        config_json = read_config(directory)
        values = dict(config_json[BASELINE_SECTION])
        kind = values.pop("kind")
        read_verifier(config_json, kind)
        values["layer"] = LayerConfig(**values["layer"])
        recorded = TargetIdentity(**values["target"])
        make = partial(KINDS[kind], StackConfig(**values | {"target": recorded}), draft_token_ids)
        require_enough(tensors, make)
        drafter = make()
        drafter.to(tensors[min(tensors)].dtype)
        state = {_renamed(name, kind, 0, 1): tensor for name, tensor in tensors.items()}
        drafter.load_state_dict(state)
    # A baseline of the base model also drafts for an adapted one.
    if target and dataclasses.replace(target, adapter=recorded.adapter) != recorded:
        raise MismatchError(
            f"The drafter at {directory} was made for another target: {recorded}, not {target}."
        )
    return drafter.eval().requires_grad_(requires_grad=False)


def _renamed(name: str, kind: str, source: int, goal: int) -> str:
    """EAGLE's tensors have published names (0); in memory they have ours (1)."""
    for pair in _EAGLE_NAMES if kind == EagleDrafter.kind else ():
        if name.startswith(pair[source]):
            return pair[goal] + name.removeprefix(pair[source])
    return name
