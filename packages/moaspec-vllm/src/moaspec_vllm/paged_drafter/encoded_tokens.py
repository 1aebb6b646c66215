"""Which tokens in vLLM's cache the drafter has encoded.

Legend: R requests, M blocks of a request.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.integer[Any]]


class EncodedTokens:
    """How many of each block's tokens, from its first on, have keys and values of the drafter.

    Blocks outlive requests: a prefix that several requests share is encoded once.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._counts = np.zeros(num_blocks, np.int64)
        self._size = block_size

    def forget(self, blocks_RM: Integers, start_R: Integers, stop_R: Integers) -> None:
        """Forget blocks that the target began to fill anew, with its tokens of a step.

        Args:
            blocks_RM: block ids of the batch's requests.
            start_R: position of each request's first token of the step.
            stop_R: position after its last one.
        """
        first_R, last_R = -(-start_R // self._size), -(-stop_R // self._size)
        for row in (first_R < last_R).nonzero()[0]:
            self._counts[blocks_RM[row, first_R[row] : last_R[row]]] = 0

    def missing(self, blocks_M: Integers, first: int, length: int) -> Integers:
        """Positions of a request's tokens that are not encoded.

        Args:
            blocks_M: its block ids.
            first: the first block to look at.
            length: number of tokens to look at, from the request's first token on.
        """
        place_M = np.arange(first, -(-length // self._size))
        start_M = place_M * self._size + self._counts[blocks_M[place_M]]
        stop_M = np.minimum((place_M + 1) * self._size, length)
        open_M = np.flatnonzero(start_M < stop_M)
        parts = [np.arange(start_M[place], stop_M[place]) for place in open_M]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def add(self, blocks_M: Integers, first: int, length: int) -> None:
        """Note that a request's tokens are encoded; arguments as for `missing`."""
        place_M = np.arange(first, -(-length // self._size))
        counts_M = np.minimum(length - place_M * self._size, self._size)
        blocks_M = blocks_M[place_M]
        self._counts[blocks_M] = np.maximum(self._counts[blocks_M], counts_M)
