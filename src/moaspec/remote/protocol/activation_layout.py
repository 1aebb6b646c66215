"""The layout of one token's activations, its records, and those of a session on a server.

Legend: T tokens, C CA's KV heads, D head dim, N last target layers, H target KV heads, L layers,
K = 2 * H * D.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moaspec.errors import WireError
from moaspec.model.drafter_config import DrafterConfig
from moaspec.remote.protocol import target_pb2 as pb
from moaspec.remote.protocol.codec import Bytes, Codec, CodecName, Floats
from moaspec.remote.protocol.position_ranges import PositionRange, PositionSet

ActivationParts = tuple[Tensor, Tensor, Tensor | None]
"""CA's key and value, (1, C, T, D) each; of the last layers (2, N, H, T, D), or None."""

BLOCK_BYTES = 8192
"""Size of messages with activations of prompts: small, so that verdicts need not wait long."""


@dataclass(frozen=True)
class ActivationLayout:
    """A record: CA's key heads and value heads, then those of the last N layers.

    Args:
        memory: codec of CA's part, 2 C vectors.
        layers: codec of the last layers' part, 2 N H vectors; None where N is 0.
        num_layers: N.
    """

    memory: Codec
    layers: Codec | None = None
    num_layers: int = 0

    @staticmethod
    def of(
        config: DrafterConfig, codec: CodecName, num_layers: int, head_dim: int
    ) -> ActivationLayout:
        """Make the layout for a drafter and N; `head_dim` is the target's.

        Raises:
            InputError: an unknown codec.
        """
        ca = config.cross_attention
        memory = Codec(codec, 2 * ca.num_kv_heads, ca.head_dim)
        if not num_layers:
            return ActivationLayout(memory)
        vectors = num_layers * config.kv_size // head_dim
        return ActivationLayout(memory, Codec(codec, vectors, head_dim), num_layers)

    @property
    def token_bytes(self) -> int:
        """Size of a record."""
        return self.memory.token_bytes + (self.layers.token_bytes if self.layers else 0)

    def encode(self, parts: ActivationParts) -> Bytes:
        """Records of T tokens, (T, `token_bytes`)."""
        key_1CTD, value_1CTD, layers_2NHTD = parts
        records = self.memory.encode(_vectors(torch.cat((key_1CTD, value_1CTD))))
        if self.layers is None:
            return records
        assert layers_2NHTD is not None, "N > 0 comes with last layers"
        own = layers_2NHTD[:, -self.num_layers :].flatten(0, 1)
        return np.concatenate((records, self.layers.encode(_vectors(own))), axis=1)

    def decode(self, data: bytes, count: int, like: Tensor) -> ActivationParts:
        """Decode records into tensors with the dtype and device of `like`.

        Raises:
            WireError: `data` has not the size of `count` records.
        """
        if self.layers is None:
            return *_halves(self.memory.decode(data, count), like), None
        if len(data) != count * self.token_bytes:
            raise WireError(
                f"{count} tokens are {count * self.token_bytes} bytes here, got {len(data)}."
            )
        size = self.memory.token_bytes
        table = np.frombuffer(data, np.uint8).reshape(count, self.token_bytes)
        memory = self.memory.decode(table[:, :size].tobytes(), count)
        layers_TVD = self.layers.decode(table[:, size:].tobytes(), count)
        flat = torch.from_numpy(layers_TVD).to(like).transpose(0, 1)
        return *_halves(memory, like), flat.unflatten(0, (2, self.num_layers, -1))


def _vectors(stacked: Tensor) -> Floats:
    """(n, heads, T, D) -> (T, n * heads, D) float32."""
    flat = stacked.flatten(0, 1).transpose(0, 1).float().cpu().contiguous()
    values: Any = flat.numpy()
    return values


def _halves(values_TVD: Floats, like: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, (1, C, T, D) each."""
    both = torch.from_numpy(values_TVD).to(like).transpose(0, 1)
    key_CTD, value_CTD = both.chunk(2)
    return key_CTD[None], value_CTD[None]


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
