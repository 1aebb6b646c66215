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

from moaspec.errors import UnsupportedTargetError
from moaspec.target.decoder_layers import WriteKV


@dataclass(frozen=True)
class LayerKV:
    """Where a layer's keys and values are in our caches, and their own shape."""

    index: int  # among the layers that have some
    key: tuple[int, int]  # its heads, and their size
    value: tuple[int, int]  # the same of values


@dataclass(frozen=True)
class KVShape:
    """The keys and values of all layers that have some.

    Our caches have one shape for all layers, so a layer with fewer or smaller heads than another,
    or with values that are smaller than keys, is padded with zeros.
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
        dims = {shape[1] for one in self.layers.values() for shape in (one.key, one.value)}
        return len(dims) == 1

    def pad(self, part_BHTD: Tensor) -> Tensor:
        """Keys or values of a layer in the shape of all layers."""
        _, heads, _, dim = part_BHTD.shape
        if (heads, dim) == (self.num_heads, self.head_dim):
            return part_BHTD
        return F.pad(part_BHTD, (0, self.head_dim - dim, 0, 0, 0, self.num_heads - heads))


class PassCache(Cache):
    """Stands in for transformers' cache during one pass.

    A layer takes part in a pass by what it asks of this cache. One that attends calls `update`. One
    that reads the keys and values of another layer asks nothing: the model hands them over. One
    with a recurrent or convolution state would call `update_recurrent_state` and
    `update_conv_state`; a subclass that keeps these per slot may be given to `GenericLayers`.
    Everything else that transformers' caches answer is refused, because an answer would be a guess.

    Args:
        write: see `moaspec.target.target`.
        shape: of what is written; None where it is not known yet.
        num_visible: keys that `write` returns.
    """

    def __init__(self, write: WriteKV, shape: KVShape | None, num_visible: int) -> None:
        self.layers: list[Any] = []
        self._write, self._shape, self._num_visible = write, shape, num_visible

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Hand new keys and values of a layer over; those to attend to."""
        if self._shape is None:
            return self._write(layer_idx, key_states, value_states)
        layer, pad = self._shape.layers[layer_idx], self._shape.pad
        key, value = self._write(layer.index, pad(key_states), pad(value_states))
        return _cut(key, layer.key), _cut(value, layer.value)

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        """Number of keys and of the first of them."""
        return self._num_visible, 0

    def get_query_offset(self, *_: Any, **__: Any) -> int:
        """Not used by our masks, which know each token's position."""
        return 0

    def get_seq_length(self, *_: Any, **__: Any) -> NoReturn:
        """Refused by an UnsupportedTargetError: rows differ in length, drafts have positions."""
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
    """For a model that asks for the length only to change something in texts that are too long."""

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
