"""A cache of transformers' kind, for one pass, that hands keys and values to a `WriteKV`.

Legend: B batch, T new tokens, S visible keys, H KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.nn.functional as F
from torch import Tensor
from transformers import Cache

from moaspec.target.decoder_layers import WriteKV
from moaspec_core.errors import UnsupportedTargetError


@dataclass(frozen=True)
class LayerKV:
    """A layer's index in our caches, and the shape of its own keys and values."""

    index: int  # among the layers that have keys and values
    key: tuple[int, int]  # number and size of the heads of keys
    value: tuple[int, int]  # number and size of the heads of values


@dataclass(frozen=True)
class KVShape:
    """The shapes of the keys and values of all layers that have them.

    Our caches have one shape for all layers, so layers with fewer or smaller heads, and values
    that are smaller than keys, are padded with zeros.
    """

    layers: Mapping[int, LayerKV]  # by the index that transformers gives to a layer
    num_heads: int  # most of a layer
    head_dim: int  # largest of a layer

    @classmethod
    def of(cls, seen: Mapping[int, tuple[Tensor, Tensor]]) -> KVShape:
        """From the keys and values of a pass, by layer, in the order of the pass."""
        layers = {
            layer: LayerKV(index, (key.shape[1], key.shape[3]), (value.shape[1], value.shape[3]))
            for index, (layer, (key, value)) in enumerate(seen.items())
        }
        shapes = [shape for one in layers.values() for shape in (one.key, one.value)]
        return cls(layers, max(heads for heads, _ in shapes), max(dim for _, dim in shapes))

    @property
    def is_even(self) -> bool:
        """Whether keys and values have one size in all layers."""
        dims = {shape[1] for layer in self.layers.values() for shape in (layer.key, layer.value)}
        return len(dims) == 1

    def pad(self, part_BHTD: Tensor) -> Tensor:
        """Keys or values of a layer in the shape of all layers."""
        _, heads, _, dim = part_BHTD.shape
        if (heads, dim) == (self.num_heads, self.head_dim):
            return part_BHTD
        return F.pad(part_BHTD, (0, self.head_dim - dim, 0, 0, 0, self.num_heads - heads))


class PassCache(Cache):
    """Stands in for transformers' cache during one pass.

    A layer that attends calls `update`. A layer that shares the keys and values of another calls
    nothing: the model hands them over. Recurrent and convolution states are not kept here, see
    `recurrent_states`. All other methods of transformers' caches raise an error.

    Args:
        write: see `moaspec.target.target`.
        shape: of keys and values; None if not known yet.
        num_visible: keys that `write` returns.
    """

    def __init__(self, write: WriteKV, shape: KVShape | None, num_visible: int) -> None:
        self.layers: list[Any] = []
        self._write, self._shape, self._num_visible = write, shape, num_visible

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values of a layer; returns the keys and values to attend to."""
        if self._shape is None:
            return self._write(layer_idx, key_states, value_states)
        layer, pad = self._shape.layers[layer_idx], self._shape.pad
        key, value = self._write(layer.index, pad(key_states), pad(value_states))
        return _cut(key, layer.key), _cut(value, layer.value)

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        """Number of keys, and index of the first one."""
        return self._num_visible, 0

    def get_query_offset(self, *_: Any, **__: Any) -> int:
        """Not used by our masks, which know each token's position."""
        return 0

    def get_seq_length(self, *_: Any, **__: Any) -> NoReturn:
        """Raise UnsupportedTargetError: rows have different lengths, drafts their own positions."""
        raise _unknown("the number of tokens before these, instead of their positions")

    def update_recurrent_state(self, *_: Any, **__: Any) -> NoReturn:
        """Refused by an UnsupportedTargetError, see the class."""
        raise _unknown("a recurrent state")

    def update_conv_state(self, *_: Any, **__: Any) -> NoReturn:
        """Refused by an UnsupportedTargetError, see the class."""
        raise _unknown("a convolution state")

    def update_indexer(self, *_: Any, **__: Any) -> NoReturn:
        """Refused by an UnsupportedTargetError, see the class."""
        raise _unknown("the keys of a sparse attention's indexer")


class ShortTextCache(PassCache):
    """A `PassCache` for models that need the length only in texts beyond our limit."""

    def get_seq_length(self, *_: Any, **__: Any) -> int:  # type: ignore[override]
        """Any length within the limit does."""
        return 0


def _cut(part_BHSD: Tensor, shape: tuple[int, int]) -> Tensor:
    heads, dim = shape
    if part_BHSD.shape[1] == heads and part_BHSD.shape[3] == dim:
        return part_BHSD
    return part_BHSD[:, :heads, :, :dim]


def _unknown(what: str) -> UnsupportedTargetError:
    return UnsupportedTargetError(f"one of its layers asks the cache for {what}")
