"""Layouts of a linear layer's weight, and which of them this CPU multiplies fastest.

Speculation needs cheap passes over a few tokens. The kernels behind `nn.Linear` are slow there, in
ways that depend on dtype and CPU:

- bf16, where the kernels of `moaspec.backends.cpu` are available: the weight is laid out for those
  kernels.
- bf16, elsewhere, with bf16 instructions: oneDNN copies the weight into its own layout on every
  call. It is laid out in advance instead.
- bf16 without any of these: products are emulated, row by row; a second token adds half a pass.
  They are computed in float32 instead, from weights kept in 16 bits (FBGEMM): float16 holds a bf16
  weight exactly, once the matrix is scaled by a power of two. Where an entry would still be lost,
  or FBGEMM is missing, the weight is kept as float32. Sums run in float32, as the emulation's do,
  and results are rounded to bf16.
- float32: MKL streams the weight once for up to three rows on Intel's CPUs, faster than a packed
  one, so it is left alone there. On other makers' it copies the weight for two rows and more, which
  then cost twice as much as one: there a weight is laid out in advance. With AVX2 alone that is
  done for heads only, because a single row would lose a quarter with the layers'.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cache
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from moaspec.backends.cpu.build import why_not
from moaspec.backends.cpu.matrix import Matrix

EXPECTED_ROWS = 8
"""Rows that oneDNN's layout is chosen for; other numbers work and are nearly as fast."""


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether linear layers can be packed here, on a CPU that oneDNN knows, and gain by it."""
    return (
        device.type == "cpu"
        and (dtype == torch.bfloat16 or (dtype == torch.float32 and _mkl_copies_weights()))
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and torch.cpu._is_avx2_supported()
    )


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that products of this dtype are computed in on this CPU."""
    if dtype == torch.bfloat16 and not _bf16_instructions():
        return torch.float32
    return dtype


def fastest_dtype(device: torch.device, *, packed: bool = True) -> torch.dtype:
    """bf16 where it is faster than float32 here (our kernels need packed weights)."""
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = device.type == "cpu" and (_bf16_instructions() or (packed and why_not() is None))
    return torch.bfloat16 if fast else torch.float32


class LinearBackend(ABC):
    """A weight (and bias) laid out for one kernel, which has no derivative."""

    bias: Tensor | None

    @abstractmethod
    def weight(self) -> Tensor: ...

    def product(self, x: Tensor) -> Tensor:
        """The product of x and the transposed weight, plus the bias, in the dtype of x."""
        if not x.requires_grad:
            return self._product(x)
        weight = self.weight()
        added = None if self.bias is None else self.bias.to(weight.dtype)
        return F.linear(x.to(weight.dtype), weight, added).to(x.dtype)

    @abstractmethod
    def _product(self, x: Tensor) -> Tensor: ...


class CpuKernelLinear(LinearBackend):
    """bf16, or fewer bits, in the layout of `moaspec.backends.cpu`."""

    def __init__(self, matrix: Matrix, bias: Tensor | None) -> None:
        self.matrix, self.bias = matrix, bias

    def weight(self) -> Tensor:
        return self.matrix.weight()

    def _product(self, x: Tensor) -> Tensor:
        return self.matrix.product(x)


class OneDnnLinear(LinearBackend):
    """bf16 or float32, in oneDNN's own layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.bias = bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_ROWS)
        self._kernel = torch.ops.mkldnn._linear_pointwise.default

    def weight(self) -> Tensor:
        return self._packed.to_dense()

    def _product(self, x: Tensor) -> Tensor:
        return cast(Tensor, self._kernel(x, self._packed, self.bias, "none", [], ""))


class Fp16Linear(LinearBackend):
    """float16, times a power of two where that is needed, for products in float32."""

    def __init__(self, scaled: Tensor, scale: float, bias: Tensor | None) -> None:
        self.bias, self._scale = bias, scale
        # A tensor: a Python number would be converted on every call.
        self._back = None if scale == 1.0 else torch.tensor(1.0 / scale)
        added = None if bias is None else bias.float() * scale
        self._packed = torch.ops.quantized.linear_prepack_fp16(scaled, added)
        # The overload itself: choosing it on every call takes longer than rounding the result.
        self._kernel = torch.ops.quantized.linear_dynamic_fp16.default

    @classmethod
    def exactly(cls, weight: Tensor, bias: Tensor | None) -> Fp16Linear | None:
        """Of a float32 weight; None where float16 cannot hold each of its entries."""
        for scale in (1.0, _into_highest_range(weight)):
            scaled = weight * scale
            if torch.equal(scaled.half().float(), scaled):
                return cls(scaled, scale, bias)
        return None

    def weight(self) -> Tensor:
        scaled, _ = torch.ops.quantized.linear_unpack_fp16(self._packed)
        return scaled / self._scale

    def _product(self, x: Tensor) -> Tensor:
        scaled = self._kernel(torch.atleast_2d(x.float()), self._packed)
        scaled = scaled if self._back is None else scaled.mul_(self._back)
        return scaled.to(x.dtype).reshape(*x.shape[:-1], scaled.shape[-1])


def _into_highest_range(weight: Tensor) -> float:
    """The power of two that takes a weight's largest entry into float16's highest range."""
    largest = float(weight.abs().max())
    return 1.0 if largest == 0.0 else 2.0 ** (15 - math.frexp(largest)[1])


class Fp32Linear(LinearBackend):
    """The weight in float32, for PyTorch's own product."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self.bias = weight, bias
        self._added = None if bias is None else bias.float()

    def weight(self) -> Tensor:
        return self._weight

    def _product(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self._weight, self._added).to(x.dtype)


def fastest_backend(
    weight: Tensor,
    bias: Tensor | None,
    *,
    drafts: bool,
    moment_II: Tensor | None = None,
    head: bool = False,
) -> LinearBackend:
    """The form for this weight here; one in four bits only where it serves `drafts`."""
    if drafts and Matrix.can_hold(weight, bits=4):
        return CpuKernelLinear(Matrix(weight, bias, bits=4, moment_II=moment_II), bias)
    if Matrix.can_hold(weight):
        return CpuKernelLinear(Matrix(weight, bias), bias)
    if weight.dtype == torch.float32:
        pays = head or torch.cpu._is_avx512_supported()
        return OneDnnLinear(weight, bias) if pays else Fp32Linear(weight, bias)
    if compute_dtype(weight.dtype) == weight.dtype:
        return OneDnnLinear(weight, bias)
    single = weight.float()
    if "fbgemm" in torch.backends.quantized.supported_engines:
        half = Fp16Linear.exactly(single, bias)
        if half is not None:
            return half
    return Fp32Linear(single, bias)


def _bf16_instructions() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _mkl_copies_weights() -> bool:
    """Whether float32 products are MKL's, on a CPU that it was not written for."""
    return torch.backends.mkl.is_available() and "Intel" not in _cpu_name()


@cache
def _cpu_name() -> str:
    return str(torch.cpu.get_capabilities().get("cpu_name", ""))
