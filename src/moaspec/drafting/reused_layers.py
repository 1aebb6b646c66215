"""Drafts in other caches than the text cache.

With N > 0 drafts pass the target's last N layers, and their keys and values go into the target's
cache behind the root, where the verification overwrites them. If CA attends to drafts
(`reads_drafts`), their keys go into CA's memory.

Legend: B requests, T tokens, W nodes of a level, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moaspec.drafting.kv_cache import StoredMemory, tree_mask
from moaspec.drafting.tree_proposer import DraftSlots

if TYPE_CHECKING:
    from moaspec.drafting.moa_proposer import MoADraftRound


def run_reused_layers(
    draft_round: MoADraftRound, states_BWE: Tensor, position_BW: Tensor, slots: DraftSlots
) -> Tensor:
    """The target's last N layers and final norm over states of nodes, (B, W, E)."""
    proposer, num = draft_round.proposer, draft_round.proposer.num_target_layers
    width, visible = states_BWE.shape[1], max(draft_round.roots) + slots.sees_BWU.shape[2]
    cache = proposer.target_cache
    assert cache is not None, "share_target_cache() comes before drafting with N > 0"
    cache.reserve(max(draft_round.cache_rows) + 1, max(draft_round.num_slots, visible))
    return proposer.target.layers.run(
        states_BWE,
        position_BW,
        num=num,
        mask_B1TS=draft_round.without_missing(
            tree_mask(draft_round.roots, slots.sees_BWU, visible)
        ),
        write=cache.writer(draft_round.cache_rows, slots.starts, width, visible),
    )


def fill_reused_layers(draft_round: MoADraftRound, x_BTE: Tensor, starts: Sequence[int]) -> None:
    """Compute keys and values of the reused layers for text without features.

    The newest tokens have no features when they are drafts themselves: drafted ahead of a
    verification, or while a link is down.

    Args:
        starts: text slot of the first of them, by row.
    """
    stops = [
        min(root, start + x_BTE.shape[1])
        for root, start in zip(draft_round.roots, starts, strict=True)
    ]
    first = [
        min(max(start, num_encoded), stop)
        for start, num_encoded, stop in zip(starts, draft_round.num_encoded, stops, strict=True)
    ]
    width = max(stop - start for stop, start in zip(stops, first, strict=True))
    if not width:
        return
    first_B1 = torch.tensor(first, device=draft_round.device)[:, None]
    position_BW = first_B1 + torch.arange(width, device=draft_round.device)
    offset_BW = position_BW - torch.tensor(starts, device=draft_round.device)[:, None]
    offset_BW = offset_BW.clamp(0, x_BTE.shape[1] - 1)
    x_BWE = x_BTE.gather(1, offset_BW[..., None].expand(-1, -1, x_BTE.shape[2]))
    causal_WW = torch.ones(width, width, dtype=torch.bool, device=draft_round.device).tril()
    roots, draft_round.roots = draft_round.roots, first
    draft_round.finish(x_BWE, position_BW, DraftSlots(first, causal_WW.expand(len(first), -1, -1)))
    draft_round.roots = roots


def memory_with_drafts(
    draft_round: MoADraftRound, x_BWE: Tensor, position_BW: Tensor, slots: DraftSlots
) -> StoredMemory:
    """CA's memory with keys of these nodes, which lie behind the root as in the text cache."""
    memory, rows = draft_round.proposer.memory, draft_round.cache_rows
    width, visible = x_BWE.shape[1], max(draft_round.roots) + slots.sees_BWU.shape[2]
    memory.reserve(max(rows) + 1, draft_round.num_slots)
    write = memory.writer(rows, slots.starts, width, visible)
    write(0, *draft_round.proposer.module.project_kv(x_BWE, position_BW))
    return StoredMemory(memory, rows, tree_mask(draft_round.roots, slots.sees_BWU, visible))
