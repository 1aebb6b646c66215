"""Preallocated keys and values of many rows.

Each row has its own length. A pass may write slots that a later pass overwrites; rejected drafts
are overwritten in this way.

Legend: L layers, N last layers, R rows, H or J KV heads, S slots, D head dim, K one layer's key and
value; B rows of one pass, T tokens, U draft slots, S' slots that a pass reads (`visible`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import gcd
from typing import Any

import torch
from torch import Tensor

from moaspec.drafting.reserved_memory import MAX_ADDRESS_SPACE, PAGE, ReservedMemory
from moaspec.model.layers import masked_attention
from moaspec.target.decoder_layers import Slots
from moaspec_core.checkpoint.drafter_config import LayerConfig

LEAST_ROWS, MAX_ROWS = 64, 1024
"""Rows for which address space is reserved: of the longest texts, and at most."""

SPARE_SLOTS = 512
"""Slots behind the longest text, for drafts and pads."""

SLOT_BUCKET = 256  # capacities are multiples of this, so that few distinct shapes occur

MAX_RECORDED_TOKENS = 64
"""Most tokens per row in a recorded pass. Longer passes take longer than their launches."""

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(query_BHTD, key_BHSD, value_BHSD, mask (B, 1, T or 1, S) bool) -> outputs, (B, H, T, D)."""


class KVCache:
    """One tensor of shape (L, 2, R, H, S, D): [:, 0] keys, [:, 1] values.

    Slot s of a row holds the verified token at position s. A draft's slot is its tree's root + 1 +
    its node, until `commit` moves it. Callers keep each row's length and hide the rest behind
    masks; nothing here needs clearing.

    On CPUs it grows without a copy, where the system allows that: it is a part of a tensor whose
    memory follows use, with the rows one after another.

    Args:
        target: the target, or the part of it on a device; gives dtype, device and longest text.
        layer: shape of a drafter's layer; None is a cache for the target's own layers.
        num_layers: of the drafter.

    Attributes:
        attend: attention over its keys and values; `FastMoAProposer` sets a faster one.
    """

    def __init__(self, target: Any, layer: LayerConfig | None = None, num_layers: int = 1) -> None:
        num_layers, shape = (target.num_layers, target) if layer is None else (num_layers, layer)
        sizes = (num_layers, 2, 0, shape.num_kv_heads, 0, shape.head_dim)
        with torch.inference_mode(mode=False):
            self._data = torch.zeros(sizes, dtype=target.dtype, device=target.device)
        self._longest = target.max_positions
        self._reserved: _ReservedRows | None = None
        self._held: dict[int, int] = {}  # by row, slots that may have been written
        self.attend: Attend = masked_attention

    @property
    def data(self) -> Tensor:
        """The current tensor; `reserve` may replace it."""
        return self._data

    @property
    def follows_use(self) -> bool:
        """Whether rows take memory, and give it back, one by one."""
        self.reserve(1, 1)
        return self._reserved is not None

    @property
    def num_bytes(self) -> int:
        """Bytes of memory in use."""
        if self._reserved is None:
            return self._data.numel() * self._data.element_size()
        return sum(map(self.row_bytes, self._held.copy().values()))

    @property
    def slot_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        layers, two, _, heads, _, dim = self._data.shape
        return layers * two * heads * dim * self._data.element_size()

    def held_slots(self, row: int) -> int:
        """Slots of a row that have memory."""
        return self._held.get(row, 0)

    def row_bytes(self, slots: int) -> int:
        """Bytes of memory of a row that has so many slots: whole pages, where it is reserved."""
        if self._data.device.type != "cpu":
            return slots * self.slot_bytes
        layers, two, _, heads, _, dim = self._data.shape
        plane = -(-slots * dim * self._data.element_size() // PAGE) * PAGE
        return layers * two * heads * plane

    def reserve(self, rows: int, slots: int) -> None:
        """Make room for at least this many rows and slots, keeping what is stored."""
        _, _, old_rows, _, old_slots, _ = self._data.shape
        if rows <= old_rows and slots <= old_slots:
            return
        rows = max(rows, old_rows)
        slots = max(old_slots, -(-slots // SLOT_BUCKET) * SLOT_BUCKET)
        with torch.inference_mode(mode=False):  # other callers write to it in other modes
            if self._reserved is None and not old_rows and self._data.device.type == "cpu":
                self._reserved = _ReservedRows.of(self._data, self._longest)
            if self._reserved is not None and self._reserved.fits(rows, slots):
                self._data = self._reserved.data[:, :, :rows, :, :slots]
            else:
                self._copy(rows, slots)

    def _copy(self, rows: int, slots: int) -> None:
        layers, two, old_rows, heads, old_slots, dim = self._data.shape
        # Growth by half keeps the copying linear when rows join one by one.
        rows = max(rows, old_rows * 3 // 2) if rows > old_rows else rows
        if slots > old_slots:
            slots = -(-max(slots, old_slots * 3 // 2) // SLOT_BUCKET) * SLOT_BUCKET
        grown = self._data.new_zeros(layers, two, rows, heads, slots, dim)
        grown[:, :, :old_rows, :, :old_slots] = self._data
        self._data, self._reserved = grown, None

    def hold(self, row: int, slots: int) -> None:
        """Make room for the first slots of a row, which a pass is about to write."""
        self.reserve(row + 1, slots)
        self._held[row] = max(slots, self._held.get(row, 0))

    def give_back(self, row: int, kept: int = 0) -> None:
        """Return the memory of a row's slots from `kept` on, where that needs no copy."""
        if self._held.get(row, 0) <= kept:
            return
        if self._reserved is not None:
            self._reserved.give_back(row, kept, self._held[row])
        self._held[row] = kept
        if not kept:
            del self._held[row]

    def cut(self, row: int, kept: int) -> None:
        """Return the memory behind a row's first slots, if it is more than a few."""
        if self._held.get(row, 0) > kept + SLOT_BUCKET:
            self.give_back(row, kept)

    def release(self) -> None:
        with torch.inference_mode(mode=False):
            self._data = self._data[:, :, :0, :, :0].clone()
        self._reserved = None
        self._held.clear()

    def writer(
        self,
        rows: Sequence[int],
        starts: Sequence[int],
        num_tokens: int,
        visible: int,
        kind: type[KVWriter] | None = None,
    ) -> KVWriter:
        """A writer for one pass.

        Args:
            rows: the pass's rows, in its batch order.
            starts: first slot that each row writes.
            num_tokens: T, slots written per row (pads included).
            visible: S', slots that attention reads.
        """
        for row, start in zip(rows, starts, strict=True):
            self._held[row] = max(start + num_tokens, self._held.get(row, 0))
        slots = Slots(self._data, rows, starts, visible)
        return (kind or KVWriter)(self._data, slots, num_tokens)

    def commit(self, row: int, start: int, slots: Sequence[int]) -> None:
        """Move `slots` (ascending) of a row to start, start + 1, ...: keep accepted drafts."""
        data_L2HSD = self._data[:, :, row]
        for to, slot in enumerate(slots, start):
            if slot != to:
                data_L2HSD[:, :, :, to] = data_L2HSD[:, :, :, slot]

    def append(self, row: int, start: int, key_NHTD: Tensor, value_NHTD: Tensor) -> None:
        """Store keys and values of all layers, or of the last N, from slot `start` on."""
        first, stop = len(self._data) - len(key_NHTD), start + key_NHTD.shape[2]
        self.hold(row, stop)
        self._data[first:, 0, row, :, start:stop] = key_NHTD
        self._data[first:, 1, row, :, start:stop] = value_NHTD

    def features(self, row: int, start: int, stop: int) -> Tensor:
        """Slots start..stop - 1 as `LayerFeatures` lays them out, (1, T, L, K), in one copy."""
        stored_L2HTD = self._data[:, :, row, :, start:stop]
        return stored_L2HTD.permute(3, 0, 2, 1, 4).flatten(2)[None]

    def attentions(
        self, rows: Sequence[int], starts: Sequence[int], num_tokens: int, mask_B1TS: Tensor
    ) -> list[StoredAttention]:
        """Attention over the cache for each of its layers in one pass; see `writer`."""
        write = self.writer(rows, starts, num_tokens, mask_B1TS.shape[-1])
        layers = range(len(self._data))
        return [StoredAttention(write, mask_B1TS, layer, self.attend) for layer in layers]


class _ReservedRows:
    """Reserved memory as a tensor (L, 2, R, H, S, D), where each row is contiguous.

    Keys of one layer and head, and values, fill whole pages.
    """

    def __init__(self, memory: ReservedMemory, data: Tensor) -> None:
        self._memory, self.data = memory, data

    @classmethod
    def of(cls, like: Tensor, longest: int) -> _ReservedRows | None:
        """Rows of the sizes of `like`, with room for a text of `longest` tokens and drafts."""
        layers, two, _, heads, _, dim = like.shape
        slot = dim * like.element_size()
        planes, per_page = layers * two * heads, PAGE // gcd(PAGE, slot)
        most = MAX_ADDRESS_SPACE // (LEAST_ROWS * planes * slot)
        # An odd number of pages: neighbouring planes would share the same sets of CPU caches.
        pages = min(longest + SPARE_SLOTS, most) * slot // PAGE | 1
        slots = -(-pages * PAGE // slot // per_page) * per_page
        found = ReservedMemory.reserve(planes * slots * slot, MAX_ROWS)
        if found is None:
            return None
        memory, rows = found
        data = memory.tensor(like.dtype).view(rows, layers, two, heads, slots, dim)
        return cls(memory, data.permute(1, 2, 0, 3, 4, 5))

    def fits(self, rows: int, slots: int) -> bool:
        return rows <= self.data.shape[2] and slots <= self.data.shape[4]

    def give_back(self, row: int, kept: int, held: int) -> None:
        """Return the memory of slots `kept` to `held` - 1."""
        item = self.data.element_size()
        layer, two, first, head, slot, _ = (item * stride for stride in self.data.stride())
        start = row * first
        if not kept:
            self._memory.give_back(start, start + first)
            return
        layers, _, _, heads, _, _ = self.data.shape
        for plane in product(range(layers), range(2), range(heads)):
            at = start + plane[0] * layer + plane[1] * two + plane[2] * head
            stop = -(-(at + held * slot) // PAGE) * PAGE
            self._memory.give_back(at + kept * slot, min(stop, at + head))


class KVWriter:
    """Writes and reads the T keys and values of each row of a pass, layer by layer."""

    def __init__(self, data: Tensor, slots: Slots, num_tokens: int) -> None:
        self.slots, self._data, self._num_tokens = slots, data, num_tokens

    def __call__(self, layer: int, key_BHTD: Tensor, value_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store both; keys and values of slots 0..S' - 1, each (B, H, S', D)."""
        self._put(layer, key_BHTD, value_BHTD)
        if self._views is not None:
            return self._views[0][layer], self._views[1][layer]
        data, index = self._data[layer], self._index
        # Rows that are not adjacent are copied, so this comes after writing.
        keys, values = data[:, :, :, : self.slots.visible].unbind(0)
        return keys[index], values[index]

    @cached_property
    def _index(self) -> slice | Tensor:
        return _index(self.slots.rows_B, self._data.device)

    @cached_property
    def _views(self) -> tuple[Sequence[Tensor], Sequence[Tensor]] | None:
        """Views of all layers, made at once: one by one they would cost as much as copies."""
        if not isinstance(self._index, slice):
            return None
        shown = self._data[:, :, self._index, :, : self.slots.visible]
        return shown[:, 0].unbind(0), shown[:, 1].unbind(0)

    @cached_property
    def _put(self) -> Callable[[int, Tensor, Tensor], None]:
        return self._put_slice() if len(self.slots.rows_B) == 1 else self._put_scattered()

    def _put_slice(self) -> Callable[[int, Tensor, Tensor], None]:
        (row,), (start,) = self.slots.rows_B, self.slots.starts_B
        places = slice(start, start + self._num_tokens)
        keys, values = (self._data[:, part, row, :, places].unbind(0) for part in (0, 1))

        def put(layer: int, key_BHTD: Tensor, value_BHTD: Tensor) -> None:
            keys[layer].copy_(key_BHTD[0])
            values[layer].copy_(value_BHTD[0])

        return put

    @cached_property
    def places(self) -> tuple[Tensor, ...]:
        """Rows, (B, 1), and the slots that each writes, (B, T)."""
        device = self._data.device
        rows_B1 = torch.tensor(self.slots.rows_B, device=device)[:, None]
        starts_B1 = torch.tensor(self.slots.starts_B, device=device)[:, None]
        return rows_B1, starts_B1 + torch.arange(self._num_tokens, device=device)

    def _put_scattered(self) -> Callable[[int, Tensor, Tensor], None]:
        rows_B1, slots_BT = self.places

        def put(layer: int, key_BHTD: Tensor, value_BHTD: Tensor) -> None:
            data = self._data[layer]
            data[0][rows_B1, :, slots_BT] = key_BHTD.transpose(1, 2)
            data[1][rows_B1, :, slots_BT] = value_BHTD.transpose(1, 2)

        return put


class GraphSafeWriter(KVWriter):
    """A `KVWriter` with its rows and slots in tensors, so that a CUDA graph can record it.

    Adjacent rows are read without a copy, and the graph holds their place; other rows are looked up
    by index. It is a `moaspec.backends.cuda_graphs.GraphSafeWrite`.
    """

    def key(self) -> Hashable:
        """The memory that a graph holds, by address and shape."""
        rows = neighbours(self.slots.rows_B)
        first = None if rows is None else rows.start
        return self._data.data_ptr(), self._data.shape, self.slots.visible, first

    def where(self) -> tuple[Tensor, ...]:
        return self.places

    def at(self, places: tuple[Tensor, ...]) -> GraphSafeWriter:
        """A writer for the slots in these tensors."""
        other = GraphSafeWriter(self._data, self.slots, self._num_tokens)
        other.places = places
        return other

    @cached_property
    def _index(self) -> slice | Tensor:
        adjacent = neighbours(self.slots.rows_B)
        return self.places[0][:, 0] if adjacent is None else adjacent

    @cached_property
    def _put(self) -> Callable[[int, Tensor, Tensor], None]:
        return self._put_scattered()


@dataclass(frozen=True)
class PassSizes:
    """Sizes of a pass over a cache."""

    tokens: int  # T of each row, pads included
    visible: int  # S', slots that attention reads
    steady: bool  # whether it may be recorded; recorded passes have few distinct sizes

    @property
    def kind(self) -> type[KVWriter]:
        """Of writer for the pass, see `KVCache.writer`."""
        return GraphSafeWriter if self.steady else KVWriter

    @classmethod
    def of(
        cls, rows: Sequence[int], starts: Sequence[int], longest: int, *, recorded: bool
    ) -> PassSizes:
        """The smallest sizes with room for the tokens.

        Args:
            rows: of the pass. Parts of one row have no pads, which would overwrite the next part.
            starts: first slot that each row writes.
            longest: tokens of the longest row.
            recorded: whether passes over a few tokens are recorded.
        """
        if not recorded or longest > MAX_RECORDED_TOKENS or len(set(rows)) < len(rows):
            return cls(longest, max(starts) + longest, steady=False)
        tokens = 1 << (longest - 1).bit_length()
        visible = -(-(max(starts) + tokens) // SLOT_BUCKET) * SLOT_BUCKET
        return cls(tokens, visible, steady=True)


class StoredAttention:
    """Self-attention of a drafter's layer over a cache, a `SelfAttend`; the mask is bool."""

    def __init__(
        self, write: KVWriter, mask_B1TS: Tensor, layer: int, attend: Attend = masked_attention
    ) -> None:
        self._write, self._layer, self._attend, self.mask = write, layer, attend, mask_B1TS
        own = write.slots.cache[layer : layer + 1]
        self.slots = replace(write.slots, cache=own)

    def __call__(self, query_BHTD: Tensor, key_BJTD: Tensor, value_BJTD: Tensor) -> Tensor:
        keys, values = self._write(self._layer, key_BJTD, value_BJTD)
        return self._attend(query_BHTD, keys, values, self.mask)


class StoredMemory:
    """Cross-attention over a cache with one layer, a `CrossAttend`; mask (B, 1, T or 1, S) bool."""

    def __init__(self, cache: KVCache, rows: Sequence[int], mask: Tensor) -> None:
        self.mask, self.slots = mask, Slots(cache.data, rows, [0] * len(rows), mask.shape[-1])
        self._cache = cache

    def __call__(self, query_BHTD: Tensor) -> Tensor:
        return self._cache.attend(query_BHTD, *self._view, self.mask)

    @cached_property
    def _view(self) -> tuple[Tensor, Tensor]:
        """Keys and values; each node of the round attends to the same."""
        key, value = self._cache.data[0, :, :, :, : self.slots.visible]
        index = _index(self.slots.rows_B, key.device)
        return key[index], value[index]


def _index(rows: Sequence[int], device: torch.device) -> slice | Tensor:
    """Rows as an index: adjacent rows as a slice, which copies nothing."""
    adjacent = neighbours(rows)
    return torch.tensor(rows, device=device) if adjacent is None else adjacent


def neighbours(rows: Sequence[int]) -> slice | None:
    """Adjacent, ascending rows as a slice; None for others."""
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return None


def prefix_mask(lengths: Sequence[int], visible: int, device: torch.device) -> Tensor:
    """True for slots below each row's length, (B, 1, 1, visible)."""
    lengths_B = torch.tensor(lengths, device=device)
    return (torch.arange(visible, device=device) < lengths_B[:, None])[:, None, None]


def tree_mask(starts: Sequence[int], tree_BTU: Tensor, visible: int) -> Tensor:
    """The slots of the cache that each query attends to.

    Args:
        starts: per row, the slot of the pass's first token.
        tree_BTU: bool; query t sees slot start + u.
        visible: S', slots that attention reads; at least max(starts) + U.

    Returns:
        (B, 1, T, S') bool: all slots before start, then those of `tree_BTU`, then none.
    """
    own = tree_BTU.shape[2]
    if len(set(starts)) == 1:
        mask_B1TS = tree_BTU.new_ones(len(tree_BTU), 1, tree_BTU.shape[1], visible)
        mask_B1TS[:, 0, :, starts[0] : starts[0] + own] = tree_BTU
        mask_B1TS[..., starts[0] + own :] = False
        return mask_B1TS
    starts_B1 = torch.tensor(starts, device=tree_BTU.device)[:, None]
    offset_BS = torch.arange(visible, device=tree_BTU.device) - starts_B1
    index_BTS = offset_BS.clamp(0, own - 1)[:, None].expand(-1, tree_BTU.shape[1], -1)
    inside_BS = (offset_BS >= 0) & (offset_BS < own)
    mask_BTS = (tree_BTU.gather(2, index_BTS) & inside_BS[:, None]) | (offset_BS < 0)[:, None]
    return mask_BTS[:, None]
