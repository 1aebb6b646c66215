"""Products are exact but for one rounding, to the same bits however many rows a call has.

Legend: O outputs, I inputs; P panels, see `moaspec.backends.cpu.matrix`.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bits import (
    ROWS,
    assert_one_rounding,
    needs_kernels,
    needs_unpacking,
    normal,
    same_bits,
    threads,
)
from moaspec.backends.cpu.build import instructions
from moaspec.backends.cpu.matrix import Matrix
from moaspec.backends.cpu.quantized_weight import BLOCK, QuantizedWeight, rounded

pytestmark = [needs_kernels, pytest.mark.kernels]


def four(bits: int) -> int | None:
    """What to ask for, so that four bits are in use with AVX2, too."""
    return 4 if bits == 4 else None


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


def bounded(weight_OI: Tensor) -> Matrix:
    """With AVX2 its largest outputs are found by bounds."""
    matrix = Matrix(weight_OI, None, bits=16)
    matrix.add_bounds()
    assert (matrix.described.bounds is None) == (instructions() not in {"avx2", "avxvnni"})
    return matrix


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("outputs", [1, 16, 100, 333])
def test_the_best_is_the_first_of_the_largest_products(outputs: int, bits: int) -> None:
    weight_OI = normal(outputs, 64)
    weight_OI[outputs // 2 :] = weight_OI[: outputs - outputs // 2].clone()  # every one twice
    bias = normal(outputs, seed=1) - 50.0  # all below the zeros that fill the last panel
    matrices = [Matrix(weight_OI, bias, bits=bits), Matrix(weight_OI, None, bits=bits)]
    for matrix in (*matrices, *([bounded(weight_OI)] if bits == 16 else [])):
        for num in (1, 2, 3):
            for rows in (0, *ROWS):
                x = normal(rows, 64, seed=2)
                with threads(num):
                    got = matrix.best(x)
                assert torch.equal(got, matrix.product(x, single=True).argmax(-1))


@pytest.mark.parametrize("bits", [16, 4])
def test_the_first_of_equal_products_is_found_in_whatever_order_panels_are_read(bits: int) -> None:
    """Panels are read as several streams, so a later one may come before an earlier one."""
    x = normal(1, 64, seed=1)
    for first, second in ((21, 69), (5, 245), (37, 53), (100, 132)):
        weight_OI = -x.expand(256, 64).clone()  # all products are negative
        weight_OI[first] = weight_OI[second] = -x[0] / 2
        matrices = [Matrix(weight_OI, None, bits=bits)]
        for matrix in (*matrices, *([bounded(weight_OI)] if bits == 16 else [])):
            for rows in ROWS:
                for num in (1, 2, 3):
                    with threads(num):
                        assert matrix.best(x.expand(rows, 64)).tolist() == [first] * rows


@pytest.mark.parametrize("outputs", [30, 5000])
@pytest.mark.parametrize("size", [*(10.0**power for power in range(-36, -14, 2)), 1e-3, 1, 1e30])
def test_bounds_rule_out_no_largest_product(size: float, outputs: int) -> None:
    """Weights and inputs of any size, also in one row, and products that nearly tie.

    Squares of small inputs underflow.
    """
    weight_OI = normal(outputs, 96) * torch.logspace(-3, 3, outputs)[:, None].bfloat16()
    weight_OI[outputs // 2 :] = weight_OI[: outputs - outputs // 2] * (1 + 2.0**-7)
    weight_OI[3] *= 1e-20
    weight_OI[4] *= 1e20  # beyond float16's scales
    x = size * normal(40, 96, seed=1)
    x[:, ::7] *= 100.0
    x[::2] += (size * weight_OI[outputs // 3]).bfloat16()
    assert torch.equal(bounded(weight_OI).best(x), Matrix(weight_OI, None).best(x))


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf, 0.0])
def test_odd_inputs_have_the_best_of_exact_products(odd: float) -> None:
    weight_OI, x = normal(100, 64), normal(3, 64, seed=1)
    x[1, 5], x[2] = odd, 0.0
    assert torch.equal(bounded(weight_OI).best(x), Matrix(weight_OI, None).best(x))


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_odd_weights_have_the_best_of_exact_products(odd: float) -> None:
    weight_OI, x = normal(100, 64), normal(3, 64, seed=1)
    weight_OI[3, 4] = odd
    assert torch.equal(bounded(weight_OI).best(x), Matrix(weight_OI, None).best(x))


def test_what_has_no_bounds() -> None:
    """A bias, or inputs that do not fill blocks."""
    for matrix in (Matrix(normal(20, 64), normal(20)), Matrix(normal(20, 34), None)):
        matrix.add_bounds()
        assert matrix.described.bounds is None


@pytest.mark.slow
def test_the_best_is_found_by_fewer_threads_than_were_asked_for() -> None:
    """OpenMP may give a team fewer, whose absent members have seen nothing."""
    code = (
        "import torch; from moaspec.backends.cpu.matrix import Matrix; torch.set_num_threads(4);"
        "weight = -torch.ones(256, 64).bfloat16(); weight[37] = -0.5;"
        "matrix = Matrix(weight, None); matrix.add_bounds();"
        "print(matrix.best(torch.ones(1, 64).bfloat16()).tolist())"
    )
    limited = os.environ | {"OMP_THREAD_LIMIT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=limited, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[37]"


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("shape", [(0,), (), (3, 0), (2, 5), (1, 2, 3)])
def test_leading_axes_stay(shape: tuple[int, ...], bits: int) -> None:
    matrix = Matrix(quantised(bits) if bits < 16 else normal(OUTPUTS, 96), None, bits=four(bits))
    x = normal(*shape, 96, seed=1)
    got = matrix.product(x)
    assert got.shape == (*shape, OUTPUTS)
    assert same_bits(got, matrix.product(x.reshape(-1, 96)).view(got.shape))


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


def test_pytorchs_own_products_between_ours_stay_as_they_are() -> None:
    """Both may use tile registers, whose shapes are a thread's own state."""
    matrix, x = Matrix(normal(40, 64), None), normal(20, 64, seed=1)
    weight_OI, many = normal(96, 128, seed=2), normal(300, 128, seed=3)
    with threads(1):
        ours, theirs = matrix.product(x), torch.nn.functional.linear(many, weight_OI)
        for rows in (1, 5, 20):
            assert same_bits(torch.nn.functional.linear(many, weight_OI), theirs)
            assert same_bits(matrix.product(x[:rows]), ours[:rows])


def unrounded(matrix: Matrix) -> tuple[Tensor, Tensor]:
    """Weights and scales of 4-bit panels, decoded as `quantized_blocks.h` describes them."""
    panels_PNX = matrix._panels
    assert panels_PNX.shape[2] == 320
    scale_PNO, zero_PNO = (
        panels_PNX[..., part].contiguous().view(torch.float16).double()
        for part in (slice(0, 32), slice(32, 64))
    )
    words_PNX = panels_PNX[..., 64:].contiguous().view(torch.int32)
    weight_OI = torch.empty(len(panels_PNX) * 16, matrix.inputs).double()
    scale_OI = torch.empty_like(weight_OI)
    for output in range(16):
        for column in range(32):
            pair, half = divmod(column, 2)
            word = (pair // 8 * 2 + output // 8) * 16 + output % 8 * 2 + half
            codes_PN = words_PNX[..., word] >> 4 * (pair % 8) & 15
            scale_PN, zero_PN = scale_PNO[..., output], zero_PNO[..., output]
            weight_OI[output::16, column::32] = scale_PN * codes_PN + zero_PN
            scale_OI[output::16, column::32] = scale_PN
    return weight_OI[: matrix.outputs], scale_OI[: matrix.outputs]


OUTPUTS = 72
"""Of weights in few bits: five panels, more than are multiplied together."""


def four_bit_weight() -> Tensor:
    """Usual blocks; one of zeros, one of equal weights, one of tiny and one of large ones."""
    weight_OI = 0.1 * normal(OUTPUTS, 128).float()
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


def test_rounding_makes_up_for_errors_in_inputs_that_vary_together() -> None:
    """Of outputs, not of weights: those are further from what they were."""
    weight_OI = normal(64, 128)
    few, other = normal(1024, 12, seed=1).double(), normal(1024, 128, seed=2).double()
    x = few @ normal(12, 128, seed=3).double() + 0.1 * other
    plain, made_up = (
        rounded(weight_OI, moment_II).weight().double()
        for moment_II in (None, (x.T @ x / len(x)).float())
    )

    def error(weight: Tensor, inputs: Tensor) -> float:
        return float((inputs @ (weight - weight_OI.double()).T).square().mean())

    assert error(made_up, x) < 0.25 * error(plain, x)
    anything = normal(1024, 128, seed=4).double()
    assert error(plain, anything) < error(made_up, anything) < 10 * error(plain, anything)


def test_rounding_by_inputs_that_do_not_vary_together_is_the_plain_one() -> None:
    weight_OI = four_bit_weight()
    plain, by_moment = rounded(weight_OI), rounded(weight_OI, torch.eye(128))
    for name in ("scale_ON", "zero_ON", "codes_ONI"):
        assert torch.equal(getattr(plain, name), getattr(by_moment, name)), name


def test_blocks_of_one_number_are_kept() -> None:
    weight_OI = four_bit_weight()
    read_OI = Matrix(weight_OI, None, bits=4).weight()
    assert (read_OI[3, :32] == 0.0).all()
    # float16 holds every bf16 number of a usual range: it has more bits.
    assert torch.equal(read_OI[4, 32:64], weight_OI[4, 32:64])


def quantised(bits: int, *, seed: int = 0) -> Tensor:
    """A weight as a quantiser leaves it: usual blocks, and unusual ones of each kind."""
    made = torch.Generator().manual_seed(seed)
    lowest, highest = (0, 15) if bits == 4 else (-127, 127)
    codes_ONI = torch.randint(lowest, highest + 1, (OUTPUTS, 3, BLOCK), generator=made).float()
    codes_ONI[..., 3], codes_ONI[..., 17] = lowest, highest
    scale_ON1 = (0.01 + 0.02 * torch.rand(OUTPUTS, 3, 1, generator=made)).half().float()
    zero_ON1 = (-0.3 * torch.rand(OUTPUTS, 3, 1, generator=made)).half().float()
    scale_ON1[1, 0], zero_ON1[1, 0] = 2.0**-20, 0.0  # float16's smallest numbers
    scale_ON1[2, 1], zero_ON1[2, 1] = 1000.0, -4000.0
    zero_ON1[3, 2] = 0.01  # no negative weight
    zero_ON1[4, 0] = -0.5  # no positive one
    codes_ONI[5, 1] = codes_ONI[5, 1, 3]  # all equal
    codes_ONI[6, 2], zero_ON1[6, 2] = 0, 0.0  # all zero
    zero_ON1 = zero_ON1 if bits == 4 else torch.zeros(())
    return (scale_ON1 * codes_ONI + zero_ON1).flatten(1).bfloat16()


@needs_unpacking
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_few_bits_are_found_and_change_no_bit(bits: int, biased: bool) -> None:
    for seed in range(20):
        weight_OI, bias = quantised(bits, seed=seed), normal(OUTPUTS, seed=1) if biased else None
        few, all_ = Matrix(weight_OI, bias), Matrix(weight_OI, bias, bits=16)
        assert (few.bits, all_.bits) == (bits, 16)
        assert few.num_bytes == 80 * 3 * (BLOCK * bits // 8 + (4 if bits == 4 else 2))
        assert same_bits(few.weight(), weight_OI)
        x = normal(max(ROWS), weight_OI.shape[1], seed=2)
        for rows in ROWS:
            expected = all_.product(x[:rows], single=True)
            assert same_bits(few.product(x[:rows], single=True), expected)


@pytest.mark.parametrize("by_output", [False, True])
def test_codes_come_back_from_either_order(by_output: bool) -> None:
    coded = rounded(four_bit_weight())
    coded = dataclasses.replace(
        coded,
        scale_ON=coded.scale_ON[:32],
        zero_ON=coded.zero_ON[:32],
        codes_ONI=coded.codes_ONI[:32],
    )
    again = QuantizedWeight.of(coded.panels(by_output=by_output), 4, by_output=by_output)
    for name in ("scale_ON", "zero_ON", "codes_ONI"):
        assert torch.equal(getattr(again, name), getattr(coded, name)), name


@pytest.mark.parametrize("bits", [4, 8])
def test_one_number_more_needs_all_bits(bits: int) -> None:
    weight_OI = quantised(bits)
    weight_OI[7, 40] += weight_OI[7].abs().amax() * 0.01
    matrix = Matrix(weight_OI, None)
    assert matrix.bits == 16
    assert same_bits(matrix.weight(), weight_OI)


def test_usual_weights_keep_all_bits() -> None:
    assert Matrix(normal(40, 64), None).bits == 16
    assert Matrix(normal(40, 34), None).bits == 16  # not in blocks


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_four_bits_are_multiplied_with_eight(rows: int, biased: bool) -> None:
    """Inputs have 127 steps up to the largest of a block; a block's zero meets them unrounded."""
    bias = normal(OUTPUTS, seed=1) if biased else None
    matrix, x = Matrix(four_bit_weight(), bias, bits=4), normal(rows, 128, seed=2)
    if rows:
        x[0, :32] = 0.0
        x[-1, 32:64] *= 1e4
    weight_OI, _ = unrounded(matrix)
    blocks = x.float().unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    steps = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0.0)
    rounded_x = ((blocks * steps).round().double() * (largest.double() / 127)).flatten(1)
    zero_OI = weight_OI.unflatten(1, (-1, BLOCK)).amin(-1, keepdim=True).expand(-1, -1, BLOCK)
    codes_OI = weight_OI - zero_OI.flatten(1)
    expected = rounded_x @ codes_OI.t() + x.double() @ zero_OI.flatten(1).t()
    terms = rounded_x.abs() @ codes_OI.abs().t() + x.double().abs() @ zero_OI.flatten(1).abs().t()
    if bias is not None:
        expected, terms = expected + bias.double(), terms + bias.double().abs()
    got = matrix.product(x, single=True).double()
    assert ((got - expected).abs() <= 64 * 2.0**-24 * terms).all()


@pytest.mark.parametrize("odd", [1e-38, 1e-33, 3e38, float("inf"), float("nan")])
def test_odd_inputs_stay_in_their_row(odd: float) -> None:
    """Four bits are for drafts, which any input may reach; a tiny one counts as zero there."""
    matrix, x = Matrix(four_bit_weight(), None, bits=4), normal(3, 128, seed=2)
    expected = matrix.product(x)
    x[1, 40] = odd
    if odd < 1e-30:
        x[1] = odd
    got = matrix.product(x)
    assert same_bits(got[::2], expected[::2])
    if odd < 1e-30:
        assert got[1].abs().max() < 1e-24


def test_what_kernels_refuse_to_hold() -> None:
    assert Matrix.can_hold(normal(5, 2))
    assert not Matrix.can_hold(normal(5, 3))
    assert not Matrix.can_hold(normal(0, 2))
    assert not Matrix.can_hold(normal(5, 2).float())
    assert not Matrix.can_hold(normal(5, 2).to("meta"))
    assert Matrix.can_hold(normal(5, 64), bits=4)
    assert not Matrix.can_hold(normal(5, 48), bits=4)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_matrix_may_be_moved(bits: int) -> None:
    weight_OI = quantised(bits) if bits < 16 else normal(OUTPUTS, 96)
    matrix, x = Matrix(weight_OI, normal(OUTPUTS, seed=1), bits=four(bits)), normal(3, 96, seed=2)
    before, weight_OI = matrix.product(x), matrix.weight().clone()
    room = torch.zeros(matrix.num_bytes, dtype=torch.uint8)
    matrix.move(room)
    assert room.any()
    assert same_bits(matrix.product(x), before)
    matrix.use_large_pages()
    assert same_bits(matrix.product(x), before)
    assert same_bits(matrix.weight(), weight_OI)


def test_a_matrix_with_bounds_may_be_moved() -> None:
    matrix, x = bounded(normal(OUTPUTS, 96)), normal(3, 96, seed=2)
    before = matrix.best(x)
    matrix.use_large_pages()
    assert torch.equal(matrix.best(x), before)
