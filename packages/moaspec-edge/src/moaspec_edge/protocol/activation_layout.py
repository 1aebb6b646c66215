"""The layout of one token's activations.

Legend: T tokens, C CA's KV heads, D head dim, N last target layers, H target KV heads, V vectors of
a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moaspec_core.checkpoint.drafter_config import DrafterConfig
from moaspec_core.errors import WireError
from moaspec_edge.protocol.codec import Bytes, Codec, CodecName, Floats


class Activations(NamedTuple):
    """Decoded activations of T tokens, float32."""

    # key_CTD, value_CTD: CA's.
    key_CTD: Floats
    value_CTD: Floats
    layers_2NHTD: Floats | None  # keys and values of the last layers; None where N is 0

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens."""
        return self.key_CTD.shape[1]


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
        """The layout for a drafter and N; `head_dim` is the target's.

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

    def encode(self, memory_TVD: Floats, layers_TVD: Floats | None) -> Bytes:
        """Records of T tokens, (T, `token_bytes`).

        Args:
            memory_TVD: CA's keys, then its values.
            layers_TVD: keys of the last layers, then their values; None where N is 0.
        """
        records = self.memory.encode(memory_TVD)
        if self.layers is None:
            return records
        assert layers_TVD is not None, "N > 0 comes with last layers"
        return np.concatenate((records, self.layers.encode(layers_TVD)), axis=1)

    def decode(self, data: bytes, count: int) -> Activations:
        """Decode records; WireError where `data` has not the size of `count` records."""
        if len(data) != count * self.token_bytes:
            raise WireError(
                f"{count} tokens are {count * self.token_bytes} bytes here, got {len(data)}."
            )
        records = np.frombuffer(data, np.uint8).reshape(count, self.token_bytes)
        size = self.memory.token_bytes
        memory_TVD = self.memory.decode(records[:, :size])
        if self.layers is None:
            return Activations(*_halves(memory_TVD), None)
        layers_TVD = self.layers.decode(records[:, size:])
        heads = self.layers.vectors // (2 * self.num_layers)
        layers_VTD = layers_TVD.swapaxes(0, 1)
        layers_2NHTD = layers_VTD.reshape(2, self.num_layers, heads, count, self.layers.width)
        return Activations(*_halves(memory_TVD), layers_2NHTD)


def written(records: Bytes, start: int, fresh: Bytes) -> Bytes:
    """Write records from position `start` on; returns the table, a larger one if it was full."""
    stop = start + len(fresh)
    if stop > len(records):
        room = max(stop - len(records), len(records) // 2)
        records = np.concatenate((records, np.zeros((room, fresh.shape[1]), np.uint8)))
    records[start:stop] = fresh
    return records


def _halves(values_TVD: Floats) -> tuple[Floats, Floats]:
    """Keys and values, (C, T, D) each."""
    key_CTD, value_CTD = np.split(values_TVD.swapaxes(0, 1), 2)
    return key_CTD, value_CTD
