"""Which tokens in vLLM's cache the drafter has encoded.

Legend: R requests of the batch, M blocks, N tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.integer[Any]]


class EncodedTokens:
    """How many of each block's tokens, from its first on, have keys and values of the drafter.

    Blocks outlive requests: a prefix that several requests share is encoded once. For each row of
    the batch, the number of leading blocks that are whole is kept too, so a step looks at few
    blocks however long texts are.

    Attributes:
        first_R: the first block of each row's text that the drafter reads.
    """

    def __init__(self, num_blocks: int, block_size: int, max_requests: int) -> None:
        self._counts = np.zeros(num_blocks, np.int64)
        self._size = block_size
        self.first_R = np.zeros(max_requests, np.int64)
        self._whole_R = np.zeros(max_requests, np.int64)

    def follow(self, before_R: Integers) -> None:
        """Follow requests to new rows; `before_R`: their rows before, -1 for a new request."""
        for values_R in (self.first_R, self._whole_R):
            values_R[: len(before_R)] = np.where(before_R < 0, 0, values_R[before_R])

    def forget(self, blocks_RM: Integers, start_R: Integers, stop_R: Integers) -> None:
        """Forget blocks that the target began to fill anew, with its tokens of a step.

        Args:
            blocks_RM: block ids of the batch's requests.
            start_R: position of each request's first token of the step.
            stop_R: position after its last one.
        """
        first_R = -(-start_R // self._size)
        number_R = -(-stop_R // self._size) - first_R
        rows_M = np.repeat(np.arange(len(first_R)), number_R)
        self._counts[blocks_RM[rows_M, ranges(first_R, number_R)]] = 0
        known_R = self._whole_R[: len(start_R)]
        np.minimum(known_R, start_R // self._size, out=known_R)

    def missing(
        self, blocks_RM: Integers, rows_R: Integers, length_R: Integers
    ) -> tuple[Integers, Integers]:
        """Row and position of the tokens that are not encoded, (N,) each, text by text.

        Args:
            blocks_RM: block ids of the batch's requests.
            rows_R: rows to look at.
            length_R: number of tokens to look at in each, from the text's first token on.
        """
        first_R = self._whole_R[rows_R]
        number_R = (-(-length_R // self._size) - first_R).clip(min=0)
        rows_M, place_M = np.repeat(rows_R, number_R), ranges(first_R, number_R)
        start_M = place_M * self._size + self._counts[blocks_RM[rows_M, place_M]]
        stop_M = np.minimum((place_M + 1) * self._size, np.repeat(length_R, number_R))
        number_M = (stop_M - start_M).clip(min=0)
        return np.repeat(rows_M, number_M), ranges(start_M, number_M)

    def add(self, blocks_RM: Integers, row_N: Integers, position_N: Integers) -> None:
        """Note that tokens are encoded: all tokens that `missing` found, or the first of them."""
        place_N, offset_N = np.divmod(position_N, self._size)
        np.maximum.at(self._counts, blocks_RM[row_N, place_N], offset_N + 1)

    def complete(self, rows_R: Integers, length_R: Integers) -> None:
        """Note that none of the first tokens of these rows is missing."""
        self._whole_R[rows_R] = length_R // self._size

    def start_at(self, rows_R: Integers, first_R: Integers) -> None:
        """Leave out the blocks of these rows before the given ones."""
        self.first_R[rows_R] = first_R
        self._whole_R[rows_R] = np.maximum(self._whole_R[rows_R], first_R)


def ranges(start_R: Integers, number_R: Integers) -> Integers:
    """Concatenate the `number` integers from each `start` on."""
    stop_R = number_R.cumsum()
    total = int(stop_R[-1]) if len(stop_R) else 0
    return np.arange(total) + np.repeat(start_R - stop_R + number_R, number_R)
