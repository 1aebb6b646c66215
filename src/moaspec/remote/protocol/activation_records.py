"""The activations of one session on a server, and which of them its device lacks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moaspec.remote.protocol import target_pb2 as pb
from moaspec.remote.protocol.activation_layout import ActivationLayout, ActivationParts
from moaspec.remote.protocol.codec import Bytes
from moaspec.remote.protocol.position_ranges import PositionRange, PositionSet

BLOCK_BYTES = 8192
"""Size of messages with activations of prompts: small, so that verdicts need not wait long."""


class RecordRequest(NamedTuple):
    """The activations that a device asks for, and the positions that it holds already."""

    layout: ActivationLayout
    held: list[PositionRange]


class ActivationRecords:
    """Encoded activations of the first `len` tokens of a text, and the sent positions."""

    def __init__(self, layout: ActivationLayout) -> None:
        self.layout = layout
        self._data: Bytes = np.zeros((0, layout.token_bytes), np.uint8)
        self._length = 0
        self.sent = PositionSet()
        self.reading = True
        """While a prompt is encoded, the oldest tokens are sent first; afterwards the newest."""

    def __len__(self) -> int:
        return self._length

    @property
    def num_bytes(self) -> int:
        """Bytes of memory held."""
        return self._data.nbytes

    def write(self, start: int, parts: ActivationParts) -> None:
        """Store activations of tokens from `start` on, and drop older ones of these positions."""
        fresh = self.layout.encode(parts)
        stop = start + len(fresh)
        if stop > len(self._data):
            grown = np.zeros((max(stop, 3 * len(self._data) // 2), fresh.shape[1]), np.uint8)
            grown[: self._length] = self._data[: self._length]
            self._data = grown
        self._data[start:stop] = fresh
        self._length = stop

    def cut(self, length: int) -> None:
        """Drop all but the first `length` tokens."""
        self._length = min(self._length, length)
        self.sent.cut(length)

    def next_block(self) -> pb.Activations | None:
        """Take the next activations that the device lacks; marks them as sent."""
        most = max(1, BLOCK_BYTES // self.layout.token_bytes)
        find = self.sent.first_gap if self.reading else self.sent.last_gap
        run = find(self._length, most)
        return None if run is None else self._message(run)

    def newest(self, start: int) -> pb.Activations | None:
        """Take the activations from `start` on, if they fit one block; marks them as sent."""
        fits = (self._length - start) * self.layout.token_bytes <= BLOCK_BYTES
        return self._message((start, self._length)) if fits and start < self._length else None

    def _message(self, run: PositionRange) -> pb.Activations:
        start, stop = run
        self.sent.add(start, stop)
        data = self._data[start:stop].tobytes()
        return pb.Activations(start=start, count=stop - start, data=data)
