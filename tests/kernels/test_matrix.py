"""Products are exact but for one rounding, to the same bits however many rows a call has.

Legend: O outputs, I inputs; P panels, see `moaspec.kernels.matrix`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bits import ROWS, assert_one_rounding, needs_kernels, normal, same_bits, threads
from moaspec.kernels import Matrix
from moaspec.kernels.matrix import BLOCK

pytestmark = needs_kernels


def product_in_float64(x: Tensor, weight_OI: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The product, and the same of absolute values."""
    added = torch.zeros(len(weight_OI)).double() if bias is None else bias.double()
    weight_IO = weight_OI.double().t()
    return x.double() @ weight_IO + added, x.double().abs() @ weight_IO.abs() + added.abs()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(1, 2), (16, 64), (17, 34), (48, 30), (64, 2), (100, 96), (333, 130)]
)
def test_products_are_rounded_once(outputs: int, inputs: int, biased: bool) -> None:
    weight_OI, bias = normal(outputs, inputs), normal(outputs, seed=1) if biased else None
    matrix = Matrix(weight_OI, bias)
    assert same_bits(matrix.weight(), weight_OI)
    for rows in ROWS:
        x = normal(rows, inputs, seed=2)
        exact, terms = product_in_float64(x, weight_OI, bias)
        assert_one_rounding(matrix.product(x), exact, terms)
        single = matrix.product(x, single=True)
        assert single.dtype == torch.float32
        # Sums of at most 131 float32 numbers, 2 ** -24 of rounding each.
        assert ((single.double() - exact).abs() <= 131 * 2.0**-24 * terms).all()
        # One rounding of the very same sums.
        assert same_bits(single.bfloat16(), matrix.product(x))


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("shape", [(0,), (), (3, 0), (2, 5), (1, 2, 3)])
def test_leading_axes_stay(shape: tuple[int, ...], bits: int) -> None:
    matrix = Matrix(normal(40, 64), None, bits=bits)
    x = normal(*shape, 64, seed=1)
    got = matrix.product(x)
    assert got.shape == (*shape, 40)
    assert same_bits(got, matrix.product(x.reshape(-1, 64)).view(got.shape))


def test_inputs_may_be_strided() -> None:
    matrix, x = Matrix(normal(40, 64), None), normal(64, 2, 7, seed=1)
    assert same_bits(matrix.product(x.permute(1, 2, 0)), matrix.product(x.permute(1, 2, 0).clone()))


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize(
    ("outputs", "inputs", "bits"),
    [(16, 64, 16), (100, 96, 16), (176, 34, 16), (16, 32, 4), (100, 96, 4), (176, 64, 4)],
)
def test_a_row_has_the_same_bits_in_every_call(
    outputs: int, inputs: int, bits: int, single: bool
) -> None:
    matrix = Matrix(normal(outputs, inputs), normal(outputs, seed=1), bits=bits)
    x = normal(max(ROWS), inputs, seed=2)
    with threads(1):
        whole = matrix.product(x, single=single)
    for num in (1, 2):
        with threads(num):
            for rows in ROWS:
                assert same_bits(matrix.product(x[:rows], single=single), whole[:rows])
                assert same_bits(matrix.product(x[7 : 7 + rows], single=single), whole[7:][:rows])


def unrounded(matrix: Matrix) -> tuple[Tensor, Tensor]:
    """What four bits stand for, by the description of panels in `cpu.cpp`; and their scales."""
    panels_PNX = matrix._panels
    assert panels_PNX.shape[2] == 160
    scale_PNO, zero_PNO = (
        panels_PNX[..., part].contiguous().view(torch.float16).double()
        for part in (slice(0, 16), slice(16, 32))
    )
    words_PNjOh = panels_PNX[..., 32:].unflatten(2, (4, 16, 2)).int() & 0xFFFF
    weight_OI = torch.empty(len(panels_PNX) * 16, matrix.inputs).double()
    scale_OI = torch.empty_like(weight_OI)
    for block in range(panels_PNX.shape[1]):
        for pair in range(16):
            codes_POh = words_PNjOh[:, block, pair // 4] >> 4 * (pair % 4) & 15
            for half in range(2):
                column = 32 * block + 2 * pair + half
                scale_PO, zero_PO = scale_PNO[:, block], zero_PNO[:, block]
                weight_OI[:, column] = (scale_PO * codes_POh[..., half] + zero_PO).flatten()
                scale_OI[:, column] = scale_PO.flatten()
    return weight_OI[: matrix.outputs], scale_OI[: matrix.outputs]


def four_bit_weight() -> Tensor:
    """Usual blocks; one of zeros, one of equal weights, one of tiny and one of large ones."""
    weight_OI = 0.1 * normal(40, 128).float()
    weight_OI[3, :32], weight_OI[4, 32:64] = 0.0, -0.37
    weight_OI[5, 64:96] *= 1e-6
    weight_OI[6, 96:] *= 1e4
    weight_OI[7, :32] = weight_OI[7, :32].abs() + 3.0
    return weight_OI.bfloat16()


def test_four_bits_are_within_half_a_step() -> None:
    weight_OI = four_bit_weight()
    matrix = Matrix(weight_OI, None, bits=4)
    read_OI, scale_OI = unrounded(matrix)
    # Half a step; and what float16 (11 bits) takes from the zero and, 15 times, from the scale.
    allowed_OI = 0.5 * scale_OI + 2.0**-11 * (weight_OI.abs().double() + 15 * scale_OI)
    allowed_OI += 2.0**-25  # float16's smallest numbers are as far apart as twice this
    blocks = (read_OI - weight_OI.double()).abs() <= allowed_OI
    # Sixteen numbers from the lowest to the highest, so steps are a fifteenth of the range.
    assert blocks.all()
    low, high = weight_OI[0, :32].amin(), weight_OI[0, :32].amax()
    assert_close(scale_OI[0, 0], ((high.double() - low.double()) / 15), atol=0, rtol=2e-3)
    assert same_bits(matrix.weight(), read_OI.bfloat16())


def test_blocks_of_one_number_are_kept() -> None:
    weight_OI = four_bit_weight()
    read_OI = Matrix(weight_OI, None, bits=4).weight()
    assert (read_OI[3, :32] == 0.0).all()
    # float16 holds every bf16 number of a usual range: it has more bits.
    assert torch.equal(read_OI[4, 32:64], weight_OI[4, 32:64])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_products_of_four_bits_are_those_of_their_codes(rows: int, biased: bool) -> None:
    bias = normal(40, seed=1) if biased else None
    matrix = Matrix(four_bit_weight(), bias, bits=4)
    weight_OI, scale_OI = unrounded(matrix)
    x = normal(rows, 128, seed=2)
    exact, _ = product_in_float64(x, weight_OI, bias)
    # Not the weights themselves are summed, but codes and, once for a block, the zero.
    lowest_OI = weight_OI.unflatten(1, (-1, BLOCK)).amin(-1, keepdim=True).expand(-1, -1, BLOCK)
    parts_OI = 15 * scale_OI + lowest_OI.flatten(1).abs()
    _, terms = product_in_float64(x, parts_OI, bias)
    # Sums of some hundred float32 numbers, 2 ** -24 of rounding each.
    got = matrix.product(x, single=True)
    assert ((got.double() - exact).abs() <= 131 * 2.0**-24 * terms).all()
    assert same_bits(got.bfloat16(), matrix.product(x))


def test_what_kernels_refuse_to_hold() -> None:
    assert Matrix.can_hold(normal(5, 2))
    assert not Matrix.can_hold(normal(5, 3))
    assert not Matrix.can_hold(normal(0, 2))
    assert not Matrix.can_hold(normal(5, 2).float())
    assert not Matrix.can_hold(normal(5, 2).to("meta"))
    assert Matrix.can_hold(normal(5, 64), bits=4)
    assert not Matrix.can_hold(normal(5, 48), bits=4)


@pytest.mark.parametrize("bits", [16, 4])
def test_a_matrix_may_be_moved(bits: int) -> None:
    matrix, x = Matrix(normal(40, 64), normal(40, seed=1), bits=bits), normal(3, 64, seed=2)
    before, weight_OI = matrix.product(x), matrix.weight().clone()
    room = torch.zeros(matrix.num_bytes, dtype=torch.uint8)
    matrix.move(room)
    assert room.any()
    assert same_bits(matrix.product(x), before)
    assert same_bits(matrix.weight(), weight_OI)
