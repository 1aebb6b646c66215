"""Kernels choose the token that PyTorch chooses."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bits import needs_kernels, threads
from moaspec import SamplingParams
from moaspec.backends import fast_sampling  # noqa: F401 - registers the kernels
from moaspec.backends.cpu.fused_sampling import can_choose, choose
from moaspec.sampling.choose import COLDEST, next_tokens, perturbed, sampler_params
from moaspec.sampling.processors import Prefix

pytestmark = [needs_kernels, pytest.mark.kernels]

VOCABULARIES = (1, 5, 16, 17, 127, 128, 1039, 20_000)
"""Less than a register, full ones and others; less than what bounds are computed for, and more."""
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 4},
    {"top_k": 1000},
    {"top_p": 0.0001},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.01},
]


def some_logits(nodes: int, vocabulary: int, *, scale: float, seed: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return scale * torch.randn(nodes, vocabulary, generator=made) - 3.0


def chosen(logits_NV: Tensor, settings: list[SamplingParams]) -> tuple[list[int], list[int]]:
    """By kernels, and by PyTorch."""
    prefixes = [Prefix(one, [1] * (3 + i), 1) for i, one in enumerate(settings)]
    samplers = [sampler_params(one.sampling, len(one.token_ids)) for one in prefixes]
    return choose(logits_NV, samplers), perturbed(logits_NV, prefixes).argmax(-1).tolist()


@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_the_same_token(vocabulary: int, filters: dict[str, Any], num: int) -> None:
    for temperature, scale in itertools.product((0.02, 0.8, 1.0, 7.0), (0.1, 3.0, 20.0)):
        seeds = range(30 if vocabulary < 2000 else 4)
        settings = [
            SamplingParams(
                temperature=temperature, seed=2**64 - 1 - seed, choice=seed % 3, **filters
            )
            for seed in seeds
        ]
        logits_NV = some_logits(len(settings), vocabulary, scale=scale, seed=num)
        with threads(num):
            got, expected = chosen(logits_NV, settings)
        assert got == expected


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, COLDEST, 1e-30, 1e30, 1e300])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_temperatures_out_of_the_usual(temperature: float, filters: dict[str, Any]) -> None:
    settings = [SamplingParams(temperature=temperature, seed=seed, **filters) for seed in range(20)]
    for scale in (1.0, 1e-20, 1e20):
        got, expected = chosen(some_logits(20, 300, scale=scale), settings)
        assert got == expected


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_equal_logits_and_forbidden_tokens(filters: dict[str, Any]) -> None:
    """A bias of -inf forbids tokens; most logits may be equal, and each of the best is kept."""
    settings = [SamplingParams(temperature=0.7, seed=seed, **filters) for seed in range(60)]
    logits_NV = some_logits(60, 257, scale=2.0).round()
    logits_NV[:, ::3] = -math.inf
    logits_NV[1, :-1] = -math.inf
    logits_NV[2] = 4.0
    got, expected = chosen(logits_NV, settings)
    assert got == expected
    assert got[1] == 256
    assert all(token % 3 for i, token in enumerate(got) if i != 2)


@pytest.mark.parametrize("temperature", [1e46, 1e300])
def test_forbidden_tokens_in_great_heat(temperature: float) -> None:
    settings = [SamplingParams(temperature=temperature, seed=seed) for seed in range(40)]
    logits_NV = torch.zeros(40, 300)
    logits_NV[:, :3] = logits_NV[:, 112:128] = -math.inf
    got, expected = chosen(logits_NV, settings)
    assert got == expected
    assert len(set(got)) > 10


@pytest.mark.parametrize(("filters", "second", "temperature"), [
    ({"top_p": 0.9}, -2.1972244, 1.0),
    ({"top_p": 0.99999999}, -30.0, 1.0),
    ({"min_p": 0.05}, -3.0, 1.0014246046113),
])  # fmt: skip
def test_filters_are_not_rounded_to_float32(
    filters: dict[str, Any], second: float, temperature: float
) -> None:
    settings = [
        SamplingParams(temperature=temperature, seed=seed, **filters) for seed in range(200)
    ]
    got, expected = chosen(torch.tensor([[0.0, second]] * 200), settings)
    assert got == expected


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_logits_that_are_no_numbers_give_some_token(filters: dict[str, Any]) -> None:
    """A model that overflows must not take the process down."""
    settings = [SamplingParams(temperature=1.0, seed=seed, **filters) for seed in range(3)]
    logits_NV = some_logits(3, 20_000, scale=1.0)
    logits_NV[0], logits_NV[1, ::40] = math.nan, math.nan
    logits_NV[2, 7] = math.inf
    samplers = [sampler_params(one, 3) for one in settings]
    assert all(0 <= token < 20_000 for token in choose(logits_NV, samplers))


def test_nodes_by_themselves_and_strided_logits() -> None:
    settings = [SamplingParams(temperature=1.0, top_p=0.9, seed=seed) for seed in range(6)]
    wide_VN = some_logits(99, 6, scale=2.0)
    got, expected = chosen(wide_VN.t(), settings)
    assert got == expected
    alone = [
        choose(wide_VN.t()[i, None], [sampler_params(one, 3 + i)])[0]
        for i, one in enumerate(settings)
    ]
    assert alone == got
    assert choose(wide_VN.t()[:0], []) == []


def test_what_goes_to_pytorch() -> None:
    assert can_choose(torch.zeros(2, 5))
    assert not can_choose(torch.zeros(2, 5).double())
    assert not can_choose(torch.zeros(2, 5, device="meta"))
    assert not can_choose(torch.zeros(2, 0))


def test_the_distribution_is_computed_by_kernels_where_it_can_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefix = Prefix(SamplingParams(temperature=1.0, top_k=50, seed=3), [1, 2], 1)
    logits_NV = some_logits(1, 1039, scale=3.0)
    expected = next_tokens(logits_NV.double(), [prefix])
    monkeypatch.setattr("moaspec.sampling.choose.perturbed", None)
    assert next_tokens(logits_NV, [prefix]) == expected
