"""A linear layer's weight as the kernels read it, and its product.

Legend: I inputs and O outputs of a matrix, P = O / 16 panels.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from ctypes import c_int32, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from moaspec.backends.cpu.build import call, instructions, library, unpacks_exactly, why_not
from moaspec.backends.cpu.quantized_weight import (
    BLOCK,
    LANES,
    QuantizedWeight,
    found_codes,
    rounded,
)
from moaspec.backends.cpu.structures import MatrixStruct, OutputBoundsStruct
from moaspec.target.weights.stored import StoredWeight


class Matrix:
    """A linear layer's weight in panels of 16 outputs.

    Their layouts are in `weight_layout.h`, `gguf_weights.h`, `quantized_blocks.h`, `amx_gemm.h`,
    `w4a8.h` and, of copies for bounds, `w7a8.h`.

    A weight that was dequantised from 4 or 8 bits, with a scale and perhaps a zero point for each
    32 inputs (by `--quantize`), is recognised and stored in these bits. Kernels then read a
    third or half of the bytes, and products have the same bits (see `unpacks_exactly`).

    Args:
        weight_OI: bf16, see `can_hold`.
        bias: (O,), or None.
        bits: None: the fewest that hold every weight exactly. 16: bf16. 4: W4A8, that is, each 32
            weights of an output are rounded to 16 levels, each 32 inputs to 255.
        moment_II: second moment of the inputs, for rounding; see `quantized_weight.rounded`.
    """

    _stored: StoredWeight | None = None

    def __init__(
        self,
        weight_OI: Tensor,
        bias: Tensor | None,
        *,
        bits: int | None = None,
        moment_II: Tensor | None = None,
    ) -> None:
        self.outputs, self.inputs = weight_OI.shape
        wide = -self.outputs % LANES
        padded_OI = pad(weight_OI, (0, 0, 0, wide)) if wide else weight_OI
        coded = None
        if bits == 4:
            coded = rounded(padded_OI, moment_II)
        elif bits is None and unpacks_exactly():
            coded = found_codes(padded_OI.contiguous())
        self.bits, self._rounded = 16 if coded is None else coded.bits, bits == 4
        self._by_output = self.bits == 4 and not self._rounded and instructions() == "amx"
        if coded is None:
            self._panels = _panels(padded_OI)
        else:
            self._panels = coded.panels(by_output=self._by_output)
        self.described = MatrixStruct(
            None, None, self.inputs, self.outputs, self.bits, self._rounded
        )
        self._segments = [_Segment(self.described, 0, 0)]
        self._begin(bias)

    @classmethod
    def of_stored(
        cls, stored: StoredWeight, bias: Tensor | None, *, rounds_inputs: bool = False
    ) -> Matrix:
        """A weight in the bits of a GGUF file, see `gguf_weights.h` and `can_hold_stored`.

        It is read from the file when it is moved, or used for the first time.

        Args:
            stored: the weight.
            bias: (O,), or None.
            rounds_inputs: round each 32 inputs to 8 bits, see `gguf_integers.h`.
        """
        made = cls.__new__(cls)
        made._stored, (made.outputs, made.inputs) = stored, stored.shape
        made.bits, made._rounded = 0, rounds_inputs
        made._panels = torch.empty(0, dtype=torch.uint8)
        made._segments = _segments_of(stored, rounds_inputs=rounds_inputs)
        made.described = made._segments[0].struct
        made._begin(bias)
        return made

    def _begin(self, bias: Tensor | None) -> None:
        self._bias = None if bias is None else pad(bias.float(), (0, -self.outputs % LANES))
        self._bounds: _OutputBounds | None = None
        self._reference = ctypes.byref(self.described)
        self._describe()
        self._call, self._call_best = library().moaspec_product, library().moaspec_best

    def _describe(self) -> None:
        for struct, first_byte, first_output in self._segments:
            struct.panels = self._panels.data_ptr() + first_byte
            if self._bias is not None:
                struct.bias = self._bias.data_ptr() + self._bias.itemsize * first_output
        if self._bounds is not None:
            self.described.bounds = ctypes.addressof(self._bounds.described)

    @property
    def num_bytes(self) -> int:
        return self._panels.nbytes if self._stored is None else sum(_sizes(self._stored))

    @property
    def in_one_format(self) -> bool:
        """Whether all outputs have one layout."""
        return len(self._segments) == 1

    def move(self, room: Tensor) -> None:
        """Move the panels to these `num_bytes` bytes."""
        if self._is_unread():
            assert self._stored is not None
            _read_panels(self._stored, room)
            self._panels = room
        else:
            place = room.view(self._panels.dtype).view(self._panels.shape)
            place.copy_(self._panels)
            self._panels = place
        self._describe()

    def read(self) -> None:
        """Read a weight that is still in its file."""
        if self._is_unread():
            self.use_large_pages()

    def _is_unread(self) -> bool:
        return self._stored is not None and not len(self._panels)

    def use_large_pages(self) -> None:
        """Move the panels to large pages: faster for weights that every call reads whole."""
        self.move(large_pages(self.num_bytes))

    def add_bounds(self) -> None:
        """With AVX2, let a copy of the weight in 7 bits make `best` faster.

        The copy's outputs bound the exact ones. Only panels that may have the largest output are
        computed, so the result stays the same. A weight with a bias gets no copy.
        """
        has_bounds = (
            instructions() in {"avx2", "avxvnni"} and self.bits == 16 and self._bias is None
        )
        if has_bounds and self.inputs % BLOCK == 0:
            self._bounds = _OutputBounds(self._padded_weight(), self.outputs)
            self._describe()

    @staticmethod
    def can_hold(weight_OI: Tensor, *, bits: int | None = None) -> bool:
        """Whether kernels support this weight on this machine."""
        return (
            weight_OI.dtype == torch.bfloat16
            and weight_OI.device.type == "cpu"
            and weight_OI.numel() > 0
            and weight_OI.shape[1] % (BLOCK if bits == 4 else 2) == 0
            and why_not() is None
        )

    @staticmethod
    def can_hold_stored(stored: StoredWeight) -> bool:
        """Whether kernels support a weight in a file's bits on this machine."""
        *rest, _ = stored.parts
        whole = all(len(part.order) % LANES == 0 for part in rest)
        return whole and why_not() is None

    def weight(self) -> Tensor:
        """The weight, (O, I) bf16, computed in each call."""
        if self._stored is not None:
            return self._stored.dequantised().bfloat16()
        return self._padded_weight()[: self.outputs]

    def _padded_weight(self) -> Tensor:
        if self.bits == 16:
            return self._panels.transpose(1, 2).reshape(-1, self.inputs)
        return QuantizedWeight.of(self._panels, self.bits, by_output=self._by_output).weight()

    def product(self, x: Tensor, *, single: bool = False) -> Tensor:
        """The product of x, (..., I) bf16, and the transposed weight, plus the bias, (..., O).

        Args:
            single: return float32 sums, not rounded to bf16.
        """
        assert x.dtype == torch.bfloat16, x.dtype
        assert x.shape[-1] == self.inputs, (x.shape, self.inputs)
        self.read()
        x = x.contiguous()
        rows = x.numel() // self.inputs
        out = x.new_empty(
            (*x.shape[:-1], self.outputs), dtype=torch.float32 if single else torch.bfloat16
        )
        call(self._call, self._reference, x, rows, self.inputs, out, c_int32(single))
        return out

    def best(self, x_TI: Tensor) -> Tensor:
        """The index of each row's largest output, the first of equal ones: (T,) int64.

        Outputs are compared in float32; they are not written to memory.

        Args:
            x_TI: bf16.
        """
        assert x_TI.dtype == torch.bfloat16, x_TI.dtype
        assert x_TI.shape[1:] == (self.inputs,), (x_TI.shape, self.inputs)
        self.read()
        x_TI = x_TI.contiguous()
        out_T = torch.empty(len(x_TI), dtype=torch.int64)
        call(self._call_best, self._reference, x_TI, len(x_TI), self.inputs, out_T)
        return out_T


class _OutputBounds:
    """Bounds on the outputs of a weight without bias; see `OutputBounds` in `gemm.h`.

    Args:
        weight_OI: bf16, with the padding of the last panel.
        outputs: without it.
    """

    def __init__(self, weight_OI: Tensor, outputs: int) -> None:
        padded, inputs = weight_OI.shape
        # A block has a float16 scale for each output, and its inputs' codes.
        self._panels = large_pages(padded * inputs // BLOCK * (2 + BLOCK))
        norm_O, error_O = torch.empty(2, padded)
        call(
            library().moaspec_round_to_7_bits,
            *(weight_OI.contiguous(), padded, inputs, self._panels, norm_O, error_O),
        )
        # Both norms are float32 sums, which round, and squares may underflow.
        norm_O, error_O = (1.001 * x + 1e-17 for x in (norm_O, error_O))
        # The rounding of the float32 sums of both products is at most this share of |weights| |x|.
        float_error = (inputs + 2 * BLOCK) * 2.0**-23
        self._norm_O, self._error_O = norm_O, error_O + float_error * (norm_O + error_O)
        copy = MatrixStruct(self._panels.data_ptr(), None, inputs, outputs, 8, 1, None)
        self.described = OutputBoundsStruct(copy, self._error_O.data_ptr(), self._norm_O.data_ptr())


class _Segment(NamedTuple):
    """Some outputs of a matrix, in one format."""

    struct: MatrixStruct
    first_byte: int  # of the panels
    first_output: int


def _sizes(stored: StoredWeight) -> list[int]:
    """Bytes of the panels of each part."""
    panel_bytes = library().moaspec_gguf_panel_bytes
    panel_bytes.restype = c_int64
    inputs = c_int64(stored.shape[1])
    return [
        panel_bytes(c_int64(part.kind), inputs) * -(-len(part.order) // LANES)
        for part in stored.parts
    ]


def _segments_of(stored: StoredWeight, *, rounds_inputs: bool) -> list[_Segment]:
    """A segment for each run of parts of one kind."""
    segments: list[_Segment] = []
    byte, output = 0, 0
    for part, size in zip(stored.parts, _sizes(stored), strict=True):
        if not segments or segments[-1].struct.kind != part.kind:
            outputs, inputs = stored.shape[0] - output, stored.shape[1]
            shape = (inputs, outputs, 0, rounds_inputs)
            struct = MatrixStruct(None, None, *shape, None, part.kind, None)
            if segments:
                segments[-1].struct.next = ctypes.addressof(struct)
            segments.append(_Segment(struct, byte, output))
        byte, output = byte + size, output + len(part.order)
    return segments


def _read_panels(stored: StoredWeight, room: Tensor) -> None:
    """Write the panels of all parts into bytes that are 0."""
    pack, sizes = library().moaspec_gguf_pack, _sizes(stored)
    for part, place in zip(stored.parts, room.split(sizes), strict=True):
        rows, order = part.tensor.blocks, torch.from_numpy(part.order)
        stored_rows = (part.kind, c_void_p(rows.ctypes.data), rows.strides[0])
        call(pack, *stored_rows, order, len(order), stored.shape[1], place)
        part.tensor.forget_pages()


def large_pages(num_bytes: int) -> Tensor:
    """Memory in pages of 2 MiB where the system has them, for fewer TLB misses."""
    # Private, because most systems give shared memory no large pages.
    room = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):
        room.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(room, dtype=torch.uint8)


def _panels(weight_OI: Tensor) -> Tensor:
    """The bf16 panels of a weight, (P, I / 2, 16, 2)."""
    outputs, inputs = weight_OI.shape
    return weight_OI.view(outputs // LANES, LANES, inputs // 2, 2).transpose(1, 2).contiguous()
