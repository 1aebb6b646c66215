"""Cosines and sines of rotary embeddings, looked up instead of computed.

Legend: S positions, D rotated dims.
"""

import threading
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from moaspec.model.layers import CosSin

AngleRows = tuple[Tensor, Tensor, int]
"""Cosines and sines, float32, contiguous, (S, D) each, and the row of the first position asked for;
those of the next positions follow."""

FindAngles = Callable[[int, int], AngleRows]
"""Finds those of positions start..stop - 1."""

INITIAL_POSITIONS = 256  # positions of a new table: 128 KiB for heads of 64
_GROWTH = threading.Lock()


class AngleTable:
    """Cosines and sines, (S, D) each, looked up by position on a CPU; never shrinks."""

    def __init__(self, compute: Callable[[Tensor], CosSin]) -> None:
        self._compute = compute
        self._table, self._size = compute(torch.arange(INITIAL_POSITIONS)), INITIAL_POSITIONS

    def __call__(self, position_ids: Tensor) -> CosSin:
        """Those of positions of any shape, (..., D) each."""
        cos_SD, sin_SD = self._table
        try:
            return F.embedding(position_ids, cos_SD), F.embedding(position_ids, sin_SD)
        except IndexError:  # asking for the largest position every time costs as much as looking
            cos_SD, sin_SD = self._grown(int(position_ids.max()) + 1)
            return F.embedding(position_ids, cos_SD), F.embedding(position_ids, sin_SD)

    def reaching(self, size: int) -> CosSin:
        """Those of positions 0..S - 1, (S, D) each, with S at least `size`."""
        return self._table if size <= self._size else self._grown(size)

    def between(self, start: int, stop: int) -> CosSin:
        """Views of those of positions start..stop - 1, (stop - start, D) each."""
        cos_SD, sin_SD = self.reaching(stop)
        return cos_SD[start:stop], sin_SD[start:stop]

    def rows(self, start: int, stop: int) -> AngleRows:
        """`reaching(stop)`, and the row of `start` in it."""
        return *self.reaching(stop), start

    def _grown(self, size: int) -> CosSin:
        with _GROWTH:  # a target may be shared by threads
            if size > self._size:
                size = 2 * max(size, self._size)
                self._table = self._compute(torch.arange(size))
                # Last, and beside it: asking a tensor takes longer than looking up.
                self._size = size
            return self._table
