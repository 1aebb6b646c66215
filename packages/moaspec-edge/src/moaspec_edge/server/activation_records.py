"""Activations on a server: made by the drafter's encoder, kept as records of a session.

Legend: T tokens, C CA's KV heads, D head dim, N last target layers, H target KV heads, L layers,
K = 2 * H * D, V vectors of a token.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol.activation_layout import ActivationLayout, written
from moaspec_edge.protocol.codec import Bytes, Floats
from moaspec_edge.protocol.position_ranges import PositionRange, PositionSet

ActivationParts = tuple[Tensor, Tensor, Tensor | None]
"""CA's key and value, (1, C, T, D) each; of the last layers (2, N, H, T, D), or None."""

BLOCK_BYTES = 8192
"""Size of messages with activations of prompts: small, so that verdicts need not wait long."""


def encoded(parts: ActivationParts, layout: ActivationLayout) -> Bytes:
    """Records of T tokens, (T, `token_bytes`); of the last layers those of the layout."""
    key_1CTD, value_1CTD, layers_2NHTD = parts
    memory_TVD = _vectors(torch.cat((key_1CTD, value_1CTD)))
    if not layout.num_layers:
        return layout.encode(memory_TVD, None)
    assert layers_2NHTD is not None, "N > 0 comes with last layers"
    return layout.encode(memory_TVD, _vectors(layers_2NHTD[:, -layout.num_layers :].flatten(0, 1)))


def _vectors(stacked: Tensor) -> Floats:
    """(n, heads, T, D) -> (T, n * heads, D) float32."""
    flat = stacked.flatten(0, 1).transpose(0, 1).float().cpu().contiguous()
    values: Any = flat.numpy()
    return values


class WireEncoder:
    """The drafter's encoder on a server: its features are sent to devices.

    It takes the place of a `Proposer` in `LocalVerifier`, which calls `encode` only.

    Args:
        module: the drafter; only its encoder is used.
        most_layers: the largest N that a session may ask for.
    """

    needs = frozenset({"kv"})

    def __init__(self, module: Any, most_layers: int, num_kv_heads: int) -> None:
        self._module, self._layers, self._heads = module, most_layers, num_kv_heads

    @property
    def device(self) -> torch.device:
        found: torch.device = next(self._module.parameters()).device
        return found

    def encode(
        self, kv_1NLK: Tensor, position_ids_1N: Tensor, counts: Any
    ) -> list[ActivationParts]:
        """`ActivationParts` of each row's tokens."""
        with torch.inference_mode():
            key, value = self._module.encode(kv_1NLK, position_ids_1N)
        sizes = list(counts)
        layers = self._last(kv_1NLK).split(sizes, dim=3) if self._layers else [None] * len(sizes)
        split = zip(key.split(sizes, dim=2), value.split(sizes, dim=2), layers, strict=True)
        return list(split)

    def _last(self, kv_1NLK: Tensor) -> Tensor:
        """(1, T, L, K) -> (2, N, H, T, D)."""
        last_TNK = kv_1NLK[0, :, kv_1NLK.shape[2] - self._layers :]
        pairs = last_TNK.unflatten(-1, (self._heads, 2, -1))  # (T, N, H, 2, D)
        return pairs.permute(3, 1, 2, 0, 4)


class RecordRequest(NamedTuple):
    """The activations that a device asks for, and the positions that it holds already."""

    layout: ActivationLayout
    received: list[PositionRange]


class ActivationRecords:
    """Encoded activations of a text's first tokens, and the sent positions."""

    def __init__(self, layout: ActivationLayout) -> None:
        self.layout = layout
        self._data: Bytes = np.zeros((0, layout.token_bytes), np.uint8)
        self._length = 0
        self.sent = PositionSet()
        self.reading = True
        """While a prompt is encoded, the oldest tokens are sent first; afterwards the newest."""

    @property
    def num_bytes(self) -> int:
        return self._data.nbytes

    def write(self, start: int, parts: ActivationParts) -> None:
        """Store activations of tokens from `start` on, and drop older ones of these positions."""
        fresh = encoded(parts, self.layout)
        self._data = written(self._data, start, fresh)
        self._length = start + len(fresh)

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
