"""The pass over a single row of a verifier, in one call of CPU kernels.

Legend: T tokens, E hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from moaspec.backends.cpu.fused_layers import Slots
from moaspec.backends.fast_target import TextPass
from moaspec.drafting.kv_cache import KVCache
from moaspec.target.target import Target

if TYPE_CHECKING:
    from moaspec.engine.local_verifier import PassRow


class RowPass:
    """Runs the target over the tokens of one row, and finds its choices."""

    def __init__(self, text_pass: TextPass, cache: KVCache) -> None:
        self._text_pass, self._cache = text_pass, cache

    @classmethod
    def of(cls, target: Target, cache: KVCache) -> RowPass | None:
        """None where kernels lack a part of the target."""
        text_pass = TextPass.of(target)
        return None if text_pass is None else cls(text_pass, cache)

    def run(self, row: PassRow, *, whole: bool) -> tuple[list[Tensor], list[int] | None] | None:
        """States of the row, and greedy choices after its root and each draft.

        Args:
            whole: whether all states are needed, (T, E); else those of the root and the drafts.

        Returns:
            No choices if logits are needed. None if the pass must be made in another way.
        """
        cache_row, visible = row.request.cache_row, row.start + len(row.tokens)
        drafts = row.request.tree.parents if row.drafted else ()
        parents = [*range(-1, row.num_new - 1), *(row.num_new + parent for parent in drafts)]
        self._cache.reserve(cache_row + 1, visible)
        slots = Slots(self._cache.data, [cache_row], [row.start], visible)
        ends = 1 + len(drafts)
        choices = 0 if row.request.sampling.needs_logits else ends
        finished = len(row.tokens) if whole else ends
        found = self._text_pass.run(row.tokens, parents, slots, finished=finished, choices=choices)
        return None if found is None else ([found[0]], found[1])
