"""Tiny targets and drafters on disk, and bundles of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import generic_models
import tiny
from moaspec.backends.load import load_target
from moaspec.model.checkpoint.moa_checkpoint import save_drafter
from moaspec.model.moa import MoADrafter
from moaspec.target.generic.generic_target import target_of
from moaspec.target.target import Target
from moaspec_edge.device.bundle import export_bundle
from moaspec_train.students.drafter_sizes import DrafterSizes, drafter_config

DRAFT_IDS = torch.arange(0, tiny.VOCAB, 2)


def save_target(directory: Path, family: str = "llama", **changes: Any) -> Target:
    """A tiny target on disk, with one word per id, as it is read back from there.

    Some families' tokenizers have tokens of their own, which transformers adds when it loads them.
    """
    if family in generic_models.KINDS:
        model = generic_models.model(family, **changes)
        target = target_of(model, tiny.tokenizer(), name=family)
    else:
        target = tiny.fresh_target(family, tokenizer=tiny.tokenizer(), **changes)
    target.model.save_pretrained(directory)
    assert target.tokenizer is not None
    target.tokenizer.save_pretrained(directory)
    return load_target(directory, dtype="float32")


def save_drafter_and_target(
    directory: Path,
    family: str = "llama",
    *,
    trimmed: bool | Tensor = False,
    num_target_layers: tuple[int, ...] = (0,),
    sa_layers: int = 1,
    **changes: Any,
) -> None:
    """A tiny target in `directory / "target"` and a random drafter in `directory / "drafter"`.

    `trimmed` drafts half of the tokens, or those with the given ids.
    """
    target = save_target(directory / "target", family, **changes)
    ids = trimmed if isinstance(trimmed, Tensor) else DRAFT_IDS if trimmed else None
    torch.manual_seed(1)
    config = drafter_config(target, DrafterSizes(sa_layers=sa_layers), num_target_layers)
    save_drafter(MoADrafter(config, ids), directory / "drafter")


def save_bundle(directory: Path, family: str = "llama", *, int8: bool = False, **made: Any) -> Path:
    """A bundle in `directory / "bundle"`, beside what `save_drafter_and_target` makes."""
    save_drafter_and_target(directory, family, **made)
    export_bundle(directory / "target", directory / "drafter", directory / "bundle", int8=int8)
    return directory / "bundle"
