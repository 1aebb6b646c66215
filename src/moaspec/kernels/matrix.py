"""A linear layer's weight as the kernels read it, and its product.

Legend: I inputs and O outputs of a matrix, P = O / 16 panels, N = I / 32 blocks.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p

import torch
from torch import Tensor
from torch.nn.functional import pad

from moaspec.kernels.build import library, why_not
from moaspec.kernels.structures import MatrixFacts

LANES = 16
"""Outputs of a panel; widths of layers are multiples of it."""
BLOCK = 32
"""Inputs that share a scale and a zero in four bits."""


class Matrix:
    """A linear layer's weight in panels of 16 outputs, see `cpu.cpp`.

    Args:
        weight_OI: bf16, see `can_hold`.
        bias: (O,), or None.
        bits: 16, or 4: then the weights are rounded, to 16 equidistant numbers for each 32 inputs.
    """

    def __init__(self, weight_OI: Tensor, bias: Tensor | None, *, bits: int = 16) -> None:
        self.outputs, self.inputs = weight_OI.shape
        wide = -self.outputs % LANES
        padded_OI = pad(weight_OI, (0, 0, 0, wide)) if wide else weight_OI
        self._panels = _panels(padded_OI) if bits == 16 else _four_bit_panels(padded_OI)
        self._bias = None if bias is None else pad(bias.float(), (0, wide))
        self._bits = bits
        self._describe()
        self._call = library().moaspec_product

    def _describe(self) -> None:
        bias = None if self._bias is None else self._bias.data_ptr()
        self.described = MatrixFacts(
            self._panels.data_ptr(), bias, self.inputs, self.outputs, self._bits
        )
        self._reference = ctypes.byref(self.described)

    @property
    def num_bytes(self) -> int:
        """Of the panels."""
        return self._panels.nbytes

    def move(self, room: Tensor) -> None:
        """Let the panels live in these bytes, of which there are `num_bytes`."""
        place = room.view(self._panels.dtype).view(self._panels.shape)
        place.copy_(self._panels)
        self._panels = place
        self._describe()

    @staticmethod
    def can_hold(weight_OI: Tensor, *, bits: int = 16) -> bool:
        """Whether there are kernels for this weight here."""
        return (
            weight_OI.dtype == torch.bfloat16
            and weight_OI.device.type == "cpu"
            and weight_OI.numel() > 0
            and weight_OI.shape[1] % (2 if bits == 16 else BLOCK) == 0
            and why_not() is None
        )

    def weight(self) -> Tensor:
        """(O, I), unpacked anew."""
        if self._bits == 16:
            weight_OI = self._panels.transpose(1, 2).reshape(-1, self.inputs)
        else:
            weight_OI = _of_four_bits(self._panels)
        return weight_OI[: self.outputs]

    def product(self, x: Tensor, *, single: bool = False) -> Tensor:
        """The product of x and the transposed weight, plus the bias, (..., O).

        Args:
            x: (..., I) bf16.
            single: leave the sums in float32 instead of rounding them to bf16.
        """
        assert x.dtype == torch.bfloat16, x.dtype
        assert x.shape[-1] == self.inputs, (x.shape, self.inputs)
        x = x.contiguous()
        rows = x.numel() // self.inputs
        out = x.new_empty(
            (*x.shape[:-1], self.outputs), dtype=torch.float32 if single else torch.bfloat16
        )
        self._call(
            self._reference,
            c_void_p(x.data_ptr()),
            c_int64(rows),
            c_int64(self.inputs),
            c_void_p(out.data_ptr()),
            c_int32(single),
            c_int32(torch.get_num_threads()),
        )
        return out


def _panels(weight_OI: Tensor) -> Tensor:
    """(P, I / 2, 16, 2)."""
    outputs, inputs = weight_OI.shape
    return weight_OI.view(outputs // LANES, LANES, inputs // 2, 2).transpose(1, 2).contiguous()


def _four_bit_panels(weight_OI: Tensor) -> Tensor:
    """(P, N, 160) int16: 16 scales and 16 zeros as float16's bits, then 4 * 32 words of codes."""
    blocks_PONI = weight_OI.float().unflatten(0, (-1, LANES)).unflatten(2, (-1, BLOCK))
    low_PON1, high_PON1 = blocks_PONI.amin(-1, keepdim=True), blocks_PONI.amax(-1, keepdim=True)
    zero_PON1 = low_PON1.half()
    # float16's smallest normal number: a block of equal weights has all codes 0.
    scale_PON1 = ((high_PON1 - zero_PON1.float()) / 15).clamp(min=2.0**-14).half()
    codes_PONI = (blocks_PONI - zero_PON1.float()) / scale_PON1.float()
    codes_PONI = codes_PONI.round().clamp(0, 15).to(torch.int16)
    # Pair 4 j + k of a block is nibble k of word j; pairs' halves are neighbouring words.
    nibbles_PNjkOh = codes_PONI.unflatten(3, (4, 4, 2)).permute(0, 2, 3, 4, 1, 5)
    words_PNjOh = sum(nibbles_PNjkOh[:, :, :, k] << 4 * k for k in range(4))
    facts_PN2O = torch.stack((scale_PON1, zero_PON1)).squeeze(-1).permute(1, 3, 0, 2)
    facts_PNX = facts_PN2O.contiguous().view(torch.int16).flatten(2)
    return torch.cat((facts_PNX, words_PNjOh.flatten(2)), dim=-1).contiguous()


def _of_four_bits(panels_PNX: Tensor) -> Tensor:
    """(O, I) bf16, what the codes stand for."""
    facts_PNX, words_PNX = panels_PNX.split((2 * LANES, 4 * BLOCK), dim=-1)
    scale_PNO, zero_PNO = facts_PNX.contiguous().view(torch.float16).float().chunk(2, dim=-1)
    words_PNjOh = words_PNX.unflatten(2, (4, LANES, 2)).int()
    nibbles = torch.stack([words_PNjOh >> 4 * k & 15 for k in range(4)], dim=3)
    codes_PNOI = nibbles.permute(0, 1, 4, 2, 3, 5).flatten(3)
    weights_PNOI = scale_PNO[..., None] * codes_PNOI + zero_PNO[..., None]
    return weights_PNOI.transpose(1, 2).flatten(2).flatten(0, 1).bfloat16()
