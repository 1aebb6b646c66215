"""Numbers of kernels, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from moaspec.backends.cpu.build import unpacks_exactly, why_not
from moaspec.backends.linear_backends import can_pack

PACKS = can_pack(torch.bfloat16, torch.device("cpu"))

needs_packing = pytest.mark.skipif(not PACKS, reason="oneDNN cannot pack weights on this machine")
needs_kernels = pytest.mark.skipif(why_not() is not None, reason=f"no kernels: {why_not()}")
needs_packed_kernels = pytest.mark.skipif(
    why_not() is not None or not PACKS, reason=f"no packed kernels: {why_not()}"
)
needs_unpacking = pytest.mark.skipif(
    not unpacks_exactly(), reason="no kernels unpack weights exactly here"
)

ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 31, 200)
"""Tiles of every kind, one and two of them, more rows than a layer takes at once, and none."""
BF16_STEP = 2.0**-8
"""Rounding to bf16, which has 8 bits, moves a number by at most this share of it."""


@contextmanager
def threads(num: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def same_bits(got: Tensor, expected: Tensor) -> bool:
    """Whether they are equal, the signs of zeros and the bits of NaN included."""
    kinds = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
    return got.dtype == expected.dtype and torch.equal(
        got.contiguous().view(kinds[got.dtype]), expected.contiguous().view(kinds[expected.dtype])
    )


def assert_one_rounding(got: Tensor, exact: Tensor, terms: Tensor) -> None:
    """The bf16 number is the exact one, rounded once.

    Args:
        got: bf16.
        exact: float64.
        terms: sums of the absolute values of what is added. 2 ** -20 of them is what some tens or
            hundreds of float32 additions, of 2 ** -24 each at worst, lose.
    """
    assert got.dtype == torch.bfloat16
    assert ((got.double() - exact).abs() <= BF16_STEP * exact.abs() + 2.0**-20 * terms).all()
