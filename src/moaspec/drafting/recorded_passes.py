"""Passes over a cache that CUDA graphs record: few distinct sizes, slots in tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from moaspec.drafting.kv_cache import SLOT_BUCKET, KVWriter, neighbours

MAX_RECORDED_TOKENS = 64
"""Most tokens per row in a recorded pass. Longer passes take longer than their launches."""


class GraphSafeWriter(KVWriter):
    """A `KVWriter` with its rows and slots in tensors, so that a CUDA graph can record it.

    Adjacent rows are read without a copy, and the graph holds their place; other rows are looked up
    by index. It is a `moaspec.backends.cuda_graphs.GraphSafeWrite`.
    """

    def key(self) -> Hashable:
        """The memory that a graph holds, by address and shape."""
        rows = neighbours(self.slots.rows_B)
        first = None if rows is None else rows.start
        return self._data.data_ptr(), self._data.shape, self.slots.visible, first

    def where(self) -> tuple[Tensor, ...]:
        return self.places

    def at(self, places: tuple[Tensor, ...]) -> GraphSafeWriter:
        """A writer for the slots in these tensors."""
        other = GraphSafeWriter(self._data, self.slots, self._num_tokens)
        other.places = places
        return other

    @cached_property
    def _index(self) -> slice | Tensor:
        found = neighbours(self.slots.rows_B)
        return self.places[0][:, 0] if found is None else found

    @cached_property
    def _put(self) -> Callable[[int, Tensor, Tensor], None]:
        return self._put_scattered()


@dataclass(frozen=True)
class PassSizes:
    """Sizes of a pass over a cache."""

    tokens: int  # T of each row, pads included
    visible: int  # S', slots that attention reads
    steady: bool  # whether it may be recorded; recorded passes have few distinct sizes

    @property
    def kind(self) -> type[KVWriter]:
        """Of writer for the pass, see `KVCache.writer`."""
        return GraphSafeWriter if self.steady else KVWriter

    @classmethod
    def of(
        cls, rows: Sequence[int], starts: Sequence[int], longest: int, *, recorded: bool
    ) -> PassSizes:
        """The smallest sizes with room for the tokens.

        Args:
            rows: of the pass. Parts of one row have no pads, which would overwrite the next part.
            starts: first slot that each row writes.
            longest: tokens of the longest row.
            recorded: whether passes over a few tokens are recorded.
        """
        if not recorded or longest > MAX_RECORDED_TOKENS or len(set(rows)) < len(rows):
            return cls(longest, max(starts) + longest, steady=False)
        tokens = 1 << (longest - 1).bit_length()
        visible = -(-(max(starts) + tokens) // SLOT_BUCKET) * SLOT_BUCKET
        return cls(tokens, visible, steady=True)
