"""CA's memory in a drafter without CA: a self-attention that also attends to drafts.

Legend: B requests, W nodes of a level, E hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from moaspec.drafting.kv_cache import StoredMemory, tree_mask
from moaspec.drafting.tree_proposer import DraftSlots

if TYPE_CHECKING:
    from moaspec.drafting.moa_proposer import MoADraftRound


def memory_with_drafts(
    draft_round: MoADraftRound, x_BWE: Tensor, position_BW: Tensor, slots: DraftSlots
) -> StoredMemory:
    """The memory with keys of these nodes, which lie behind the root as in the text cache."""
    memory, rows = draft_round.proposer.memory, draft_round.cache_rows
    width, visible = x_BWE.shape[1], max(draft_round.roots) + slots.sees_BWU.shape[2]
    memory.reserve(max(rows) + 1, draft_round.num_slots)
    write = memory.writer(rows, slots.starts, width, visible)
    write(0, *draft_round.proposer.module.project_kv(x_BWE, position_BW))
    return StoredMemory(memory, rows, tree_mask(draft_round.roots, slots.sees_BWU, visible))
