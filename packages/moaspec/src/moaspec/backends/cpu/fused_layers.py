"""Decoder layers computed by kernels: bf16, on the CPU, without gradients.

Legend: B rows, T tokens, L layers, R rows of a cache, S slots, H query heads, J KV heads, D head
dim, E hidden size, X = H * D. R is the number of rotated dims in `cos_BTR` and `sin_BTR`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moaspec.backends.angle_table import AngleRows, FindAngles
from moaspec.backends.cpu.build import call, library
from moaspec.backends.cpu.cpu_attention import (
    MAX_ATTENDED,
    MAX_HEAD_DIM,
    PAIR_LANES,
    mask_strides,
)
from moaspec.backends.cpu.matrix import Matrix, large_pages
from moaspec.backends.cpu.quantized_weight import LANES
from moaspec.backends.cpu.structures import AttentionStruct, LayerStruct, MatrixStruct, PassStruct
from moaspec.target.decoder_layers import Slots

NUM_MATRICES = 4


class FusedLayer:
    """A pre-norm decoder layer without its attention, in two calls: `project` and `finish`.

    Args:
        matrices: projection to queries, keys and values (to queries alone if the layer attends to
            stored keys and values); output projection of attention; gate and up projections of the
            MLP; its down projection. The first one alone is enough for `project`.
        norms: RMSNorm's weights before attention and before the MLP, (E,) bf16.
        head_norms: of queries and of keys, (D,) bf16, or None.
        heads: H and J. J is 0 without keys and values in the first matrix, H without queries.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        *,
        norms: Sequence[Tensor],
        head_norms: Sequence[Tensor] | None,
        eps: float,
        heads: tuple[int, int],
        head_dim: int,
    ) -> None:
        self.matrices = tuple(matrices)
        self._weights = (*norms, *(None,) * (2 - len(norms)), *(head_norms or (None, None)))
        self._sizes = (eps, *heads, head_dim)
        self._num_heads, self._head_dim = heads[0] + 2 * heads[1], head_dim
        self.describe()
        self._project, self._finish = library().moaspec_project, library().moaspec_finish

    def describe(self) -> None:
        """Fill in the C structure with addresses of weights; repeat it when one has moved."""
        absent = (MatrixStruct(),) * (NUM_MATRICES - len(self.matrices))
        self.described = LayerStruct(
            *(matrix.described for matrix in self.matrices),
            *absent,
            *(None if weight is None else weight.data_ptr() for weight in self._weights),
            *self._sizes,
        )
        self._reference = ctypes.byref(self.described)

    @classmethod
    def of(
        cls, matrices: Sequence[Matrix | None], *, head_dim: int, **rest: Any
    ) -> FusedLayer | None:
        """A layer of these parts; None if kernels do not support it."""
        found = [matrix for matrix in matrices if matrix is not None]
        sizes = [size for one in found for size in (one.inputs, one.outputs)]
        if len(found) < len(matrices) or any(size % LANES for size in sizes):
            return None
        if len(found) == NUM_MATRICES and not found[2].in_one_format:
            return None  # gate and up are read panel by panel
        # As in `can_attend`: a stack's kernel also computes attention.
        if head_dim % PAIR_LANES or head_dim > MAX_HEAD_DIM:
            return None
        return cls(found, head_dim=head_dim, **rest)

    def project(self, x_BTE: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> Tensor:
        """Rotated queries and keys, and values, (B, T, H + 2 J, D).

        Args:
            cos_BTR: cosines, float32, contiguous, with any axes before R. (T, R) is enough if all
                requests share them.
        """
        assert x_BTE.dtype == torch.bfloat16, x_BTE.dtype
        x_BTE = x_BTE.contiguous()
        rows, tokens, _ = x_BTE.shape
        out = x_BTE.new_empty((rows, tokens, self._num_heads, self._head_dim))
        turned = cos_BTR.shape[-1]
        angles = (cos_BTR, sin_BTR, turned, cos_BTR.numel() // turned)
        call(self._project, self._reference, x_BTE, rows * tokens, *angles, out)
        return out

    def finish(self, x_BTE: Tensor, read_BTX: Tensor) -> Tensor:
        """Output projection and residual, norm, MLP and residual, (B, T, E)."""
        return self._finished(x_BTE, read_BTX, group=1, out=x_BTE.new_empty(x_BTE.shape))

    def finish_mean(self, x_BTE: Tensor, read_BTX: Tensor) -> Tensor:
        """The mean over tokens of `finish`, (B, E)."""
        rows, tokens, width = x_BTE.shape
        return self._finished(x_BTE, read_BTX, group=tokens, out=x_BTE.new_empty((rows, width)))

    def _finished(self, x_BTE: Tensor, read_BTX: Tensor, *, group: int, out: Tensor) -> Tensor:
        x_BTE, read_BTX = x_BTE.contiguous(), read_BTX.contiguous()
        rows = x_BTE.shape[0] * x_BTE.shape[1]
        call(self._finish, self._reference, x_BTE, read_BTX, rows, group, out)
        return out


@dataclass(frozen=True)
class FusedNorm:
    """RMSNorm, computed as within the layers."""

    weight_E: Tensor  # bf16; E is a multiple of 16
    eps: float

    def __post_init__(self) -> None:
        assert self.weight_E.dtype == torch.bfloat16
        assert len(self.weight_E) % LANES == 0

    def __call__(self, x: Tensor) -> Tensor:
        """RMSNorm of x, (..., E) bf16."""
        assert x.dtype == torch.bfloat16
        assert x.shape[-1] == len(self.weight_E)
        x = x.contiguous()
        out, width = torch.empty_like(x), len(self.weight_E)
        norm, eps = library().moaspec_norm, c_float(self.eps)
        call(norm, x, self.weight_E, eps, x.numel() // width, width, out)
        return out


class FusedStack:
    """Consecutive layers in one call.

    Args:
        layers: in order. A layer without keys and values of its own (CA) attends to stored ones
            only.
        moved: move their weights into one contiguous buffer; a weight shared by several is moved
            once. False where stacks of their own have moved them.
    """

    def __init__(self, layers: Sequence[FusedLayer], scale: float, *, moved: bool = True) -> None:
        self.layers, self.scale = tuple(layers), scale
        if moved:
            self._move_weights()
        self._described = (LayerStruct * len(layers))(*(layer.described for layer in layers))
        self._call = library().moaspec_stack

    def _move_weights(self) -> None:
        matrices = dict.fromkeys(matrix for layer in self.layers for matrix in layer.matrices)
        sizes = [matrix.num_bytes for matrix in matrices]
        for matrix, room in zip(matrices, large_pages(sum(sizes)).split(sizes), strict=True):
            matrix.move(room)
        for layer in self.layers:
            layer.describe()

    def run(
        self,
        x_BTE: Tensor,
        cos_BTR: Tensor,
        sin_BTR: Tensor,
        mask_B1TS: Tensor,
        *,
        slots: Slots,
        num: int,
        norm: FusedNorm | None = None,
    ) -> Tensor:
        """Run the last `num` layers and the norm after them: (B, T, E).

        Args:
            cos_BTR: cosines of every row, float32, contiguous.
            mask_B1TS: bool, True: may attend; contiguous. B or T is 1 if rows or tokens share it.
        """
        assert x_BTE.dtype == slots.cache.dtype == torch.bfloat16
        assert cos_BTR.numel() == x_BTE.shape[:2].numel() * cos_BTR.shape[-1]
        x_BTE = x_BTE.clone(memory_format=torch.contiguous_format)
        last, cache = self.layers[-1].described, slots.cache
        assert norm is None or len(norm.weight_E) == last.read.inputs
        layer, half, cache_row, head, slot, _ = cache.stride()
        B, turned = len(slots.rows_B), cos_BTR.shape[-1]
        rows, starts = (c_int64 * B)(*slots.rows_B), (c_int64 * B)(*slots.starts_B)
        mask_row, mask_token = mask_strides(mask_B1TS)
        attention = AttentionStruct(
            cache_rows=ctypes.addressof(rows),
            mask=mask_B1TS.data_ptr(),
            rows=B,
            tokens=x_BTE.shape[1],
            heads=last.heads,
            kv_heads=cache.shape[3],
            head_dim=last.head_dim,
            slots=slots.visible,
            key_row=cache_row,
            key_head=head,
            key_slot=slot,
            value_row=cache_row,
            value_head=head,
            value_slot=slot,
            mask_row=mask_row,
            mask_token=mask_token,
            scale=self.scale,
        )
        struct = PassStruct(
            cos_BTR.data_ptr(),
            sin_BTR.data_ptr(),
            turned,
            cos_BTR.numel() // turned,
            cache[len(cache) - num].data_ptr(),
            *(layer, half, cache_row, head),
            ctypes.addressof(starts),
            attention,
            None if norm is None else norm.weight_E.data_ptr(),
            0.0 if norm is None else norm.eps,
        )
        call(self._call, c_void_p(self.address(num)), num, ctypes.byref(struct), x_BTE)
        return x_BTE

    def address(self, num: int) -> int:
        """Address of the C structures of the last `num` layers."""
        first = len(self.layers) - num  # a device has the last layers only
        return ctypes.addressof(self._described[first])


class TextStack:
    """The last `num` layers of a stack, for passes over tokens of one text.

    The C structure is kept between passes, so no two threads may use it at once.

    Args:
        angles: `AngleTable.rows` of their rotary embeddings.
        norm: after the last layer.
    """

    def __init__(
        self, stack: FusedStack, angles: FindAngles, *, num: int = 1, norm: FusedNorm | None = None
    ) -> None:
        self.num, self.layers, self._find_angles = num, stack.address(num), angles
        # Kept alive, because the C structure holds only their addresses.
        self._place, self._held = (c_int64 * 2)(), (stack, norm)
        self.struct = PassStruct()
        layer, struct, attention = stack.layers[-1].described, self.struct, self.struct.attention
        struct.period = MAX_ATTENDED  # each token of a pass has a row of its own
        struct.starts = ctypes.addressof(self._place)
        attention.cache_rows = struct.starts + ctypes.sizeof(c_int64)
        attention.heads, attention.head_dim = layer.heads, layer.head_dim
        attention.rows, attention.scale = 1, stack.scale
        if norm is not None:
            assert len(norm.weight_E) == layer.read.inputs
            struct.norm, struct.eps = norm.weight_E.data_ptr(), norm.eps

    def begin(self, cache: Tensor, row: int, start: int, stop: int, visible: int) -> None:
        """Set the text's keys and values, and the positions, for the next pass.

        Args:
            cache: see `Slots`; with its `row`.
            start: position of the first token, and the slot of its key and value, if it has any.
            stop: end of the positions of the tokens.
            visible: number of slots that the first token sees.
        """
        struct, attention = self.struct, self.struct.attention
        self._angles = self._find_angles(start, stop)  # kept alive: another thread may grow them
        struct.cos, struct.sin, struct.turned = angle_addresses(self._angles)
        layer, half, cache_row, head, slot, _ = cache.stride()
        struct.cache = cache.data_ptr() + cache.itemsize * layer * (len(cache) - self.num)
        struct.layer, struct.half, struct.cache_row, struct.head = layer, half, cache_row, head
        attention.key_row = attention.value_row = cache_row
        attention.key_head = attention.value_head = head
        attention.key_slot = attention.value_slot = slot
        attention.kv_heads, attention.slots = cache.shape[3], visible
        self._place[0], self._place[1] = start, row


def angle_addresses(angles: AngleRows) -> tuple[int, int, int]:
    """Where cosines and sines begin, and their number in a row."""
    cos_SR, sin_SR, first = angles
    turned = cos_SR.shape[-1]
    skipped = 4 * first * turned
    return cos_SR.data_ptr() + skipped, sin_SR.data_ptr() + skipped, turned
