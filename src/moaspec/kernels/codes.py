"""Weights in four or eight bits, as panels of the kernels have them.

Legend: I inputs and O outputs of a matrix, P = O / 16 panels, N = I / 32 blocks, X bytes or numbers
of a block. Inside a block, g is one of two groups of 8 pairs, k a pair, h one of two halves of a
panel's outputs, o an output of that, e a half of a pair.
"""

from __future__ import annotations

from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from moaspec.kernels.build import library

LANES = 16
"""Outputs of a panel; widths of layers are multiples of it."""
BLOCK = 32
"""Inputs that share a scale and a zero."""
NIBBLES = 8
"""Of a word."""


@dataclass(frozen=True)
class Coded:
    """A weight in few bits: scale * code + zero.

    Attributes:
        scale_ON: of each block, float16.
        zero_ON: likewise; zeros where there are eight bits.
        codes_ONI: (O, N, 32) int8.
        bits: 4 or 8.
    """

    scale_ON: Tensor
    zero_ON: Tensor
    codes_ONI: Tensor
    bits: int

    def weight(self) -> Tensor:
        """(O, I) bf16, what the codes stand for."""
        scale_ON1, zero_ON1 = (x.double()[..., None] for x in (self.scale_ON, self.zero_ON))
        # Rounded to float32 once, as by the kernel's fused multiply and add.
        return (scale_ON1 * self.codes_ONI + zero_ON1).float().flatten(1).bfloat16()

    def panels(self) -> Tensor:
        """(P, N, bytes of a block) uint8."""
        facts = (self.scale_ON, self.zero_ON) if self.bits == 4 else (self.scale_ON,)
        facts_PNX = torch.cat([x.unflatten(0, (-1, LANES)).mT for x in facts], dim=2)
        # Pairs, halves of the 16 outputs, then outputs and halves of a pair as lanes.
        codes_PhoNke = self.codes_ONI.unflatten(0, (-1, 2, LANES // 2)).unflatten(-1, (-1, 2))
        codes_PNkhoe = codes_PhoNke.permute(0, 3, 4, 1, 2, 5)
        if self.bits == 4:
            nibbles_PNgkhoe = codes_PNkhoe.unflatten(2, (2, NIBBLES)).int()
            codes_PNkhoe = sum(nibbles_PNgkhoe[:, :, :, k] << 4 * k for k in range(NIBBLES))
        words_PNX = codes_PNkhoe.flatten(2).contiguous()
        return torch.cat((_bytes(facts_PNX), _bytes(words_PNX)), dim=2)

    @classmethod
    def of(cls, panels_PNX: Tensor, bits: int) -> Coded:
        """What `panels` made panels of."""
        facts = 2 if bits == 4 else 1
        facts_PNX = panels_PNX[..., : 2 * facts * LANES].contiguous().view(torch.float16)
        scale_ON, *zero = (x.mT.flatten(0, 1) for x in facts_PNX.split(LANES, dim=2))
        words_PNX = panels_PNX[..., 2 * facts * LANES :].contiguous()
        if bits == 4:
            words_PNgX = words_PNX.view(torch.int32).unflatten(2, (2, -1))
            nibbles = [words_PNgX >> 4 * k & 15 for k in range(NIBBLES)]
            words_PNX = torch.stack(nibbles, dim=3).to(torch.int8).flatten(2)
        codes_PNkhoe = words_PNX.view(torch.int8).unflatten(2, (BLOCK // 2, 2, LANES // 2, 2))
        codes_ONI = codes_PNkhoe.permute(0, 3, 4, 1, 2, 5).flatten(4).flatten(0, 2)
        return cls(scale_ON, zero[0] if zero else torch.zeros_like(scale_ON), codes_ONI, bits)


def _bytes(x_PNX: Tensor) -> Tensor:
    return x_PNX.contiguous().view(torch.uint8)


def found_codes(weight_OI: Tensor) -> Coded | None:
    """The fewest bits that a weight is exactly kept in; None if they are 16."""
    outputs, inputs = weight_OI.shape
    if inputs % BLOCK:
        return None
    scale_ON, zero_ON = torch.empty(2, outputs, inputs // BLOCK, dtype=torch.float16)
    codes_ONI = torch.empty(outputs, inputs // BLOCK, BLOCK, dtype=torch.int8)
    for bits in (4, 8):
        if library().moaspec_codes(
            c_void_p(weight_OI.data_ptr()),
            c_int64(outputs),
            c_int64(inputs),
            c_int64(bits),
            *(c_void_p(found.data_ptr()) for found in (scale_ON, zero_ON, codes_ONI)),
            c_int32(torch.get_num_threads()),
        ):
            return Coded(scale_ON, zero_ON, codes_ONI, bits)
    return None


def rounded(weight_OI: Tensor) -> Coded:
    """Four bits near a weight's: each block's smallest and largest numbers have codes 0 and 15."""
    blocks_ONI = weight_OI.float().unflatten(1, (-1, BLOCK))
    zero_ON1 = blocks_ONI.amin(-1, keepdim=True).half()
    above_ONI = blocks_ONI - zero_ON1.float()
    # float16's smallest normal number: a block of equal weights has all codes 0.
    scale_ON1 = (above_ONI.amax(-1, keepdim=True) / 15).clamp(min=2.0**-14).half()
    codes_ONI = (above_ONI / scale_ON1.float()).round().clamp(0, 15).to(torch.int8)
    return Coded(scale_ON1[..., 0], zero_ON1[..., 0], codes_ONI, bits=4)
