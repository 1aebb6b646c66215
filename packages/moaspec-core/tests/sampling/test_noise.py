"""The noise: published vectors, and what sampling needs of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from moaspec.sampling.noise import gumbel, seed_bits, uniform
from moaspec_core.sampling.philox import gumbel_noise, noise_bits, philox

pytestmark = pytest.mark.kernels

ONES = (0xFFFFFFFF,) * 4
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


def words(*values: int) -> tuple[Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (ONES, ONES[:2], (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_published_words(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    """The known-answer vectors of Random123 for philox4x32-10."""
    c0, c1, c2, c3 = words(*counter)
    k0, k1 = words(*key)
    assert tuple(int(word) for word in philox((c0, c1, c2, c3), (k0, k1))) == expected


def noise(seed: int = 7, choice: int = 0, position: int = 0, token: int = 0) -> float:
    return float(uniform(*(torch.tensor(v) for v in (seed_bits(seed), choice, position, token))))


def test_every_argument_matters() -> None:
    drawn = {noise(seed=2**64 - 1), noise(seed=2**63), noise(seed=2**32 + 7), noise()}
    drawn |= {noise(choice=1), noise(position=1), noise(token=1), noise(token=49151)}
    assert len(drawn) == 8


def test_noise_does_not_depend_on_what_else_is_asked_for() -> None:
    tokens = torch.arange(1000)
    seed, choice, position = torch.tensor(5), torch.tensor(1), torch.tensor(17)
    whole = gumbel(seed, choice, position, tokens)
    some = torch.tensor([998, 3, 500])
    assert gumbel(seed, choice, position, some).tolist() == whole[some].tolist()


def test_it_is_uniform_and_never_zero_or_one() -> None:
    drawn = uniform(torch.tensor(1), torch.tensor(0), torch.tensor(9), torch.arange(200_000))
    assert 0.0 < float(drawn.min()) < float(drawn.max()) < 1.0
    counts = torch.histc(drawn, bins=100, min=0.0, max=1.0)
    statistic = float(((counts - 2000) ** 2 / 2000).sum())
    # Chi-square, 99 degrees of freedom: above 159 once in ten thousand generators.
    assert statistic < 159


def test_the_extremes_are_finite() -> None:
    """The largest and the smallest mantissa that the bits can make."""
    edges = torch.tensor([1, 2**53 - 1]).double() * 2.0**-53
    assert bool(torch.isfinite(-torch.log(-torch.log(edges))).all())


def test_gumbel_has_the_right_moments() -> None:
    drawn = gumbel(torch.tensor(3), torch.tensor(0), torch.arange(100_000), torch.tensor(4))
    # Standard errors of mean and variance at this size are 0.004 and 0.012; five of them.
    assert_close(float(drawn.mean()), 0.5772, atol=0.02, rtol=0)
    assert_close(float(drawn.var()), math.pi**2 / 6, atol=0.06, rtol=0)


def test_numpy_draws_the_same_bits() -> None:
    """Of seeds over the whole range; a device without PyTorch drafts with the target's noise."""
    tokens = np.arange(0, 200_000, 37)
    for seed, choice, position in (
        (0, 0, 0),
        (7, 2, 131_071),
        (2**63 + 5, 2**32 - 1, 9),
        (2**64 - 1, 1, 1),
    ):
        drawn = uniform(*(torch.tensor(v) for v in (seed_bits(seed), choice, position, tokens)))
        bits = noise_bits(seed, choice, position, tokens)
        assert (bits == (drawn * 2.0**53).long().numpy()).all()
        assert bits.dtype == np.int64
        noise = gumbel(*(torch.tensor(v) for v in (seed_bits(seed), choice, position, tokens)))
        # Two logarithms, each within an ulp or two of the exact value.
        np.testing.assert_allclose(
            gumbel_noise(seed, choice, position, tokens), noise, rtol=1e-14, atol=1e-14
        )
