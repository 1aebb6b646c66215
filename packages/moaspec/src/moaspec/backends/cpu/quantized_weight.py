"""Weights of 4 or 8 bits, and their layout in the panels of the kernels.

Legend: I inputs and O outputs of a matrix, P = O / 16 panels, N = I / 32 blocks, X bytes or numbers
of a block. Inside a block, g is one of two groups of 8 pairs, k a pair, h one of two halves of a
panel's outputs, o an output of a half, e one of the two numbers of a pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moaspec.backends.cpu.build import call, library
from moaspec.model.moa import damped

LANES = 16  # outputs of a panel; widths of layers are multiples of it
BLOCK = 32  # inputs that share a scale and a zero point
NIBBLES = 8  # of a word
SIGN = -128  # the sign bit of an int8: flipped, the byte is the uint8 of code + 128


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight in blocks of 4 or 8 bits: scale * code + zero point."""

    scale_ON: Tensor  # of each block, float16
    zero_ON: Tensor  # of each block, float16; zeros where there are eight bits
    codes_ONI: Tensor  # (O, N, 32) int8
    bits: int  # 4 or 8

    def weight(self) -> Tensor:
        """The dequantised weight, (O, I) bf16."""
        scale_ON1, zero_ON1 = (x.double()[..., None] for x in (self.scale_ON, self.zero_ON))
        # Rounded to float32 once, as by the kernel's fused multiply and add.
        return (scale_ON1 * self.codes_ONI + zero_ON1).float().flatten(1).bfloat16()

    def panels(self, *, by_output: bool = False) -> Tensor:
        """(P, N, bytes of a block) uint8; `by_output`: 4-bit codes as in `amx_gemm.h`."""
        halves = (self.scale_ON, self.zero_ON) if self.bits == 4 else (self.scale_ON,)
        halves_PNX = torch.cat([x.unflatten(0, (-1, LANES)).mT for x in halves], dim=2)
        if by_output:
            return torch.cat((_bytes(halves_PNX), _bytes(self._words_by_output())), dim=2)
        # Order: pairs, halves of the 16 outputs, then outputs and numbers of a pair as lanes.
        codes_PhoNke = self.codes_ONI.unflatten(0, (-1, 2, LANES // 2)).unflatten(-1, (-1, 2))
        codes_PNkhoe = codes_PhoNke.permute(0, 3, 4, 1, 2, 5)
        if self.bits == 4:
            nibbles_PNgkhoe = codes_PNkhoe.unflatten(2, (2, NIBBLES)).int()
            codes_PNkhoe = sum(nibbles_PNgkhoe[:, :, :, k] << 4 * k for k in range(NIBBLES))
        else:
            codes_PNkhoe = codes_PNkhoe ^ SIGN  # plus 128
        words_PNX = codes_PNkhoe.flatten(2).contiguous()
        return torch.cat((_bytes(halves_PNX), _bytes(words_PNX)), dim=2)

    def _words_by_output(self) -> Tensor:
        """(P, N, 4 * 32) int16: four outputs of each input share a word."""
        codes_PjoNI = self.codes_ONI.unflatten(0, (-1, LANES // 4, 4)).int()
        words_PjNI = sum(codes_PjoNI[:, :, o] << 4 * o for o in range(4))
        # The highest code reaches the sign bit of an int16; the conversion keeps its bits.
        return words_PjNI.to(torch.int16).transpose(1, 2).flatten(2)

    @classmethod
    def of(cls, panels_PNX: Tensor, bits: int, *, by_output: bool = False) -> QuantizedWeight:
        """The inverse of `panels`."""
        num_halves = 2 if bits == 4 else 1
        halves_PNX = panels_PNX[..., : 2 * num_halves * LANES].contiguous().view(torch.float16)
        scale_ON, *zero = (x.mT.flatten(0, 1) for x in halves_PNX.split(LANES, dim=2))
        words_PNX = panels_PNX[..., 2 * num_halves * LANES :].contiguous()
        if by_output:
            words_PNjI = words_PNX.view(torch.int16).unflatten(2, (-1, BLOCK)).int()
            codes_PNjoI = torch.stack([words_PNjI >> 4 * o & 15 for o in range(4)], dim=3)
            codes_ONI = codes_PNjoI.permute(0, 2, 3, 1, 4).flatten(0, 2).to(torch.int8)
            return cls(scale_ON, zero[0], codes_ONI, bits)
        if bits == 4:
            words_PNgX = words_PNX.view(torch.int32).unflatten(2, (2, -1))
            nibbles = [words_PNgX >> 4 * k & 15 for k in range(NIBBLES)]
            words_PNX = torch.stack(nibbles, dim=3).to(torch.int8).flatten(2)
        else:
            words_PNX = words_PNX ^ SIGN
        codes_PNkhoe = words_PNX.view(torch.int8).unflatten(2, (BLOCK // 2, 2, LANES // 2, 2))
        codes_ONI = codes_PNkhoe.permute(0, 3, 4, 1, 2, 5).flatten(4).flatten(0, 2)
        return cls(scale_ON, zero[0] if zero else torch.zeros_like(scale_ON), codes_ONI, bits)


def _bytes(x_PNX: Tensor) -> Tensor:
    return x_PNX.contiguous().view(torch.uint8)


def found_codes(weight_OI: Tensor) -> QuantizedWeight | None:
    """The weight in the fewest bits that hold it exactly; None if that takes 16."""
    outputs, inputs = weight_OI.shape
    if inputs % BLOCK:
        return None
    scale_ON, zero_ON = torch.empty(2, outputs, inputs // BLOCK, dtype=torch.float16)
    codes_ONI = torch.empty(outputs, inputs // BLOCK, BLOCK, dtype=torch.int8)
    for bits in (4, 8):
        found = (scale_ON, zero_ON, codes_ONI)
        if call(library().moaspec_codes, weight_OI, outputs, inputs, bits, *found):
            return QuantizedWeight(*found, bits)
    return None


def rounded(weight_OI: Tensor, moment_II: Tensor | None = None) -> QuantizedWeight:
    """Round a weight to 4 bits: the smallest weight of a block gets code 0, the largest code 15.

    With `moment_II`, the rounding error of each input's weight is compensated in the weights of
    later inputs, as far as those inputs are correlated with it (GPTQ, arXiv 2210.17323).

    Args:
        moment_II: mean of x x^T over inputs x, or None.
    """
    left_IO = weight_OI.float().T.contiguous()
    shares_II = None if moment_II is None else _error_shares(moment_II)
    scales, zeros, codes = [], [], []
    for first in range(0, len(left_IO), BLOCK):
        block_XO = left_IO[first : first + BLOCK]
        zero_O = block_XO.amin(0).half()
        # float16's smallest normal number: a block of equal weights has all codes 0.
        scale_O = ((block_XO - zero_O.float()).amax(0) / 15).clamp(min=2.0**-14).half()
        if shares_II is None:
            codes_XO = _nearest(block_XO, scale_O, zero_O)
        else:
            shares_XI = shares_II[first : first + BLOCK, first:]
            codes_XO = _compensated(left_IO[first:], shares_XI, scale_O, zero_O)
        scales.append(scale_O)
        zeros.append(zero_O)
        codes.append(codes_XO.T)
    scale_ON, zero_ON = torch.stack(scales, dim=1), torch.stack(zeros, dim=1)
    return QuantizedWeight(scale_ON, zero_ON, torch.stack(codes, dim=1).to(torch.int8), bits=4)


def _nearest(weight_O: Tensor, scale_O: Tensor, zero_O: Tensor) -> Tensor:
    return ((weight_O - zero_O.float()) / scale_O.float()).round().clamp(0, 15)


def _error_shares(moment_II: Tensor) -> Tensor:
    """The share of an input's error (a row) that each later input (a column) compensates."""
    lower = np.linalg.inv(np.linalg.cholesky(damped(moment_II)))
    upper = np.linalg.cholesky(lower.T @ lower).T  # of the moment's inverse
    return torch.from_numpy(upper / upper.diagonal()[:, None]).float()


def _compensated(left_IO: Tensor, shares_XI: Tensor, scale_O: Tensor, zero_O: Tensor) -> Tensor:
    """Codes of the first block; later weights change in place to compensate its errors."""
    block_XO, codes, errors = left_IO[:BLOCK], [], []
    for i in range(BLOCK):
        code_O = _nearest(block_XO[i], scale_O, zero_O)
        error_O = block_XO[i] - torch.addcmul(zero_O.float(), scale_O.float(), code_O)
        block_XO[i + 1 :].addr_(shares_XI[i, i + 1 : BLOCK], error_O, alpha=-1)
        codes.append(code_O)
        errors.append(error_O)
    errors_XO, left, shares = torch.stack(errors).numpy(), left_IO.numpy(), shares_XI.numpy()
    for start in range(BLOCK, len(left), BLOCK):  # in blocks, as a whole update is large
        stretch = slice(start, start + BLOCK)
        left[stretch] -= shares[:, stretch].T @ errors_XO
    return torch.stack(codes)
