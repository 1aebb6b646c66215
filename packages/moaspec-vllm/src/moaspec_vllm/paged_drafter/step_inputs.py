"""The integers of a step: written on the host, read on the device, always at the same places.

A CUDA graph reads the memory that it was captured with, so nothing here is allocated step by step.

Legend: R requests, S draft steps, N tokens, F fields.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from moaspec_vllm.paged_drafter.encoded_tokens import Integers

REQUEST_FIELDS = 4  # row, id and position of the newest token, first block that CA reads
UNREAD_FIELDS = 3  # position, slot in the target's cache, slot in CA's cache
UNSEEN_FIELDS = 4  # row, position, slot in SA's cache, id
NO_SLOT = -1  # vLLM's kernels write nothing there

Numbers = TypeVar("Numbers", Integers, Tensor)


class StepInputs:
    """Memory for the integers of one step, int64: those of drafts, then those of encoding.

    The host's part is pinned where there is a GPU, and used again by the next step: vLLM waits for
    each step's tokens before it, so the transfer has ended.

    Args:
        device: of the model.
        max_requests: most requests that are drafted for.
        max_depth: most draft steps.
        max_tokens: most tokens that are encoded, for each of CA and SA.
    """

    def __init__(
        self, device: torch.device, *, max_requests: int, max_depth: int, max_tokens: int
    ) -> None:
        self._first_token = (REQUEST_FIELDS + 2 * max_depth) * max_requests
        size = self._first_token + (UNREAD_FIELDS + UNSEEN_FIELDS) * max_tokens
        self.max_tokens = max_tokens
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        on_host = device.type == "cpu"
        self._device = self._host if on_host else torch.zeros_like(self._host, device=device)
        self._numbers = self._host.numpy()

    def write_requests(self, count: int, size: int, depth: int) -> Integers:
        """Fields of requests, positions and slots of S steps, to be written: (4 + 2 S, R).

        Pads behind them are written here: their drafts are made of the first request's text, and
        their keys go nowhere.

        Args:
            count: number of requests.
            size: the same with pads.
            depth: number of draft steps.
        """
        part = _requests(self._numbers, size, depth)
        if count < size:
            pads = part[:, count:]
            pads[:REQUEST_FIELDS] = [[0], [0], [1], [0]]
            pads[REQUEST_FIELDS : REQUEST_FIELDS + depth] = np.arange(1, depth + 1)[:, None]
            pads[REQUEST_FIELDS + depth :] = NO_SLOT
        return part[:, :count]

    def write_tokens(
        self, counts: tuple[int, int], sizes: tuple[int, int]
    ) -> tuple[Integers, Integers]:
        """Fields of tokens for CA and for SA, to be written; pads behind them are written here.

        Args:
            counts: numbers of tokens for CA and for SA.
            sizes: the same with pads.
        """
        unread_3N, unseen_4N = _tokens(self._numbers[self._first_token :], *sizes)
        unread, unseen = counts
        if unread < unread_3N.shape[1]:
            unread_3N[:, unread:] = [[0], [0], [NO_SLOT]]
        if unseen < unseen_4N.shape[1]:
            unseen_4N[:, unseen:] = [[0], [0], [NO_SLOT], [0]]
        return unread_3N[:, :unread], unseen_4N[:, :unseen]

    def send(self, requests: tuple[int, int], tokens: tuple[int, int]) -> None:
        """Copy what was written to the device, in one transfer.

        Args:
            requests: `size` and `depth` of `write_requests`.
            tokens: `sizes` of `write_tokens`.
        """
        if self._device is self._host:
            return
        size, depth = requests
        unread, unseen = tokens
        stop = UNREAD_FIELDS * unread + UNSEEN_FIELDS * unseen
        stop = self._first_token + stop if stop else (REQUEST_FIELDS + 2 * depth) * size
        start = 0 if size else self._first_token
        self._device[start:stop].copy_(self._host[start:stop], non_blocking=True)

    def requests(self, size: int, depth: int) -> Tensor:
        """What `write_requests` wrote, on the device: (4 + 2 S, R)."""
        return _requests(self._device, size, depth)

    def tokens(self, unread: int, unseen: int) -> tuple[Tensor, Tensor]:
        """What `write_tokens` wrote, on the device: (3, N) and (4, N)."""
        return _tokens(self._device[self._first_token :], unread, unseen)


def _requests(numbers: Numbers, size: int, depth: int) -> Numbers:
    fields = REQUEST_FIELDS + 2 * depth
    return numbers[: fields * size].reshape(fields, size)


def _tokens(numbers: Numbers, unread: int, unseen: int) -> tuple[Numbers, Numbers]:
    middle = UNREAD_FIELDS * unread
    stop = middle + UNSEEN_FIELDS * unseen
    return (
        numbers[:middle].reshape(UNREAD_FIELDS, unread),
        numbers[middle:stop].reshape(UNSEEN_FIELDS, unseen),
    )
