"""A drafter as decoding runs it: packed copies, made once and again when its weights change."""

from __future__ import annotations

import weakref
from typing import cast

from torch import nn

from moaspec.backends.pack import packed_copy
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target


def prepared(drafter: MoADrafter, target: Target) -> tuple[MoADrafter, nn.Module]:
    """The drafter and its head as decoding runs them: packed copies where the CPU gains by them.

    They are made once and again when weights change, so a drafter in training may be tried out at
    any time. The drafter itself stays as it is. One with hooks, or with methods that were replaced,
    decodes as it is, so that they are called.
    """
    ids = drafter.draft_token_ids
    chosen = None if ids is None else ids.data_ptr()
    key = (
        weakref.ref(target),
        target.packed,
        target.dtype,
        drafter.version,
        drafter.training,
        _is_altered(drafter),
        chosen,
    )
    return cast(
        tuple[MoADrafter, nn.Module],
        drafter.prepared.get(key, lambda: _prepared(drafter, target)),
    )


def _prepared(drafter: MoADrafter, target: Target) -> tuple[MoADrafter, nn.Module]:
    head = target.draft_head(drafter.draft_token_ids, drafter.head_moment)
    return _packed(drafter), head  # packing, the last of both, gives freed memory back


def _packed(drafter: MoADrafter) -> MoADrafter:
    if drafter.training or _is_altered(drafter):
        return drafter
    # What the encoder makes of a prompt is cached and sent to devices, which have no encoder.
    encoder = getattr(drafter, "encoder", None)
    return packed_copy(drafter, exact=[] if encoder is None else [encoder])


def _is_altered(drafter: MoADrafter) -> bool:
    """Whether somebody watches its modules, or has replaced methods of theirs."""
    return any(
        module._forward_hooks
        or module._forward_pre_hooks
        or any(
            callable(value) and hasattr(type(module), name) for name, value in vars(module).items()
        )
        for module in drafter.modules()
    )
