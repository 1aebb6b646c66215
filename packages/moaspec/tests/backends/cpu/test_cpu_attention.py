"""Attention is exact but for one rounding, to the same bits wherever keys are stored.

Legend: B rows, T tokens, S slots, H query heads, J KV heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bits import BF16_STEP, assert_one_rounding, needs_kernels, normal, same_bits, threads
from moaspec.backends.cpu.cpu_attention import (
    MAX_ATTENDED,
    MAX_HEAD_DIM,
    MAX_QUERIES,
    attend,
    can_attend,
    fast_attention,
)

pytestmark = [needs_kernels, pytest.mark.kernels]


def attention_in_float64(
    query_BHTD: Tensor, key_BJSD: Tensor, value_BJSD: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """What each query reads, and zeros where it sees nothing."""
    groups = query_BHTD.shape[1] // key_BJSD.shape[1]
    key_BHSD = key_BJSD.double().repeat_interleave(groups, 1)
    value_BHSD = value_BJSD.double().repeat_interleave(groups, 1)
    scores_BHTS = scale * query_BHTD.double() @ key_BHSD.transpose(2, 3)
    if mask is not None:
        scores_BHTS = scores_BHTS.masked_fill(~mask, -torch.inf)
    return scores_BHTS.softmax(-1).nan_to_num(0.0) @ value_BHSD


def assert_reads(
    got_BHTD: Tensor,
    query_BHTD: Tensor,
    key_BJSD: Tensor,
    value_BJSD: Tensor,
    mask: Tensor | None,
    scale: float,
) -> None:
    exact = attention_in_float64(query_BHTD, key_BJSD, value_BJSD, mask, scale)
    # A weighted mean of numbers below the largest, whose weights are exact to float32's precision:
    # of scores up to some tens 2 ** -24 is lost, and the exponential makes that a share.
    largest = value_BJSD.double().abs().max()
    assert got_BHTD.shape == exact.shape
    assert_one_rounding(got_BHTD, exact, 16 * largest.expand_as(exact))


def some_heads(
    heads: int, kv_heads: int, tokens: int, slots: int, dim: int, *, rows: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    query_BHTD = normal(rows, heads, tokens, dim)
    key_BJSD, value_BJSD = normal(2, rows, kv_heads, slots, dim, seed=1)
    return query_BHTD, key_BJSD, value_BJSD


def random_mask(*shape: int) -> Tensor:
    """Of which every query sees the first slot at least."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(3)) < 0.6
    mask[..., 0] = True
    return mask


@pytest.mark.parametrize("dim", [32, 64, 96, 128, MAX_HEAD_DIM])
@pytest.mark.parametrize("slots", [1, 15, 16, 17, 32, 33, 200])
@pytest.mark.parametrize("groups", [1, 3, 4])
def test_attention_is_exact_but_for_its_rounding(groups: int, slots: int, dim: int) -> None:
    scale = dim**-0.5
    for tokens in (1, 2, 5, 9, MAX_QUERIES):
        heads = some_heads(2 * groups, 2, tokens, slots, dim, rows=2)
        for shape in ((2, 1, tokens, slots), (1, 1, tokens, slots), (2, 1, 1, slots), None):
            mask = None if shape is None else random_mask(*shape)
            assert can_attend(*heads, mask)
            assert_reads(attend(*heads, mask, scale), *heads, mask, scale)


def test_a_chunk_of_a_prompt_is_exact_and_has_the_bits_of_fewer_tokens() -> None:
    heads = some_heads(4, 2, MAX_ATTENDED, MAX_ATTENDED + 9, 32)
    mask = torch.ones(1, 1, MAX_ATTENDED, MAX_ATTENDED + 9, dtype=torch.bool).tril(9)
    assert can_attend(*heads, mask)
    got = attend(*heads, mask, 0.2)
    assert_reads(got, *heads, mask, 0.2)
    few = attend(heads[0][:, :, 500:507], *heads[1:], mask[:, :, 500:507], 0.2)
    assert same_bits(few, got[:, :, 500:507])


@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0])
def test_the_scale_is_that_of_the_scores(scale: float) -> None:
    heads = some_heads(4, 2, 5, 40, 64)
    # Scores in the hundreds: as much more is lost in them.
    exact = attention_in_float64(*heads, None, scale)
    assert_one_rounding(attend(*heads, None, scale), exact, 160 * torch.ones_like(exact))


def test_views_of_caches_are_read_in_place() -> None:
    cache = normal(3, 2, 4, 2, 50, 32)  # (L, 2, R, J, S, D)
    key_BJSD, value_BJSD = cache[1, :, 1:3, :, :37].unbind(0)
    joined_BTXD = normal(2, 6, 8, 32, seed=1)
    query_BHTD = joined_BTXD[:, :, :4].transpose(1, 2)
    mask = random_mask(2, 1, 6, 64)[..., 1:38]
    mask[..., 0] = True
    heads = (query_BHTD, key_BJSD, value_BJSD)
    assert can_attend(*heads, mask)
    got = attend(*heads, mask, 0.2)
    assert_reads(got, *heads, mask, 0.2)
    query, key, value = (part.clone() for part in heads)
    assert same_bits(got, attend(query, key, value, mask.clone(), 0.2))
    wide = random_mask(2, 1, 6, 74)[..., ::2]  # neither are its slots neighbours
    assert same_bits(attend(*heads, wide, 0.2), attend(*heads, wide.contiguous(), 0.2))


@pytest.mark.parametrize("groups", [1, 3, 4])
@pytest.mark.parametrize("visible", [1, 5, 16, 17, 60])
def test_it_does_not_matter_in_which_slots_keys_are(visible: int, groups: int) -> None:
    query, key, value = some_heads(2 * groups, 2, 3, visible, 64)
    expected = attend(query, key, value, None, 0.125)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        slots = torch.randperm(90, generator=generator)[:visible].sort().values
        # What is in other slots is finite, and would win if it were seen.
        wide_key, wide_value = (100 * normal(2, 1, 2, 90, 64, seed=9)).unbind(0)
        wide_key[:, :, slots], wide_value[:, :, slots] = key, value
        mask = torch.zeros(1, 1, 1, 90, dtype=torch.bool)
        mask[..., slots] = True
        for num in (1, 2):
            with threads(num):
                assert same_bits(attend(query, wide_key, wide_value, mask, 0.125), expected)


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 3, 4])
def test_a_query_has_the_same_bits_in_every_call(groups: int, kv_heads: int) -> None:
    """By threads that have heads to themselves, and by those that share one."""
    heads = groups * kv_heads
    query, key, value = some_heads(heads, kv_heads, MAX_QUERIES, 70, 32, rows=3)
    mask = random_mask(3, 1, MAX_QUERIES, 70)
    with threads(1):
        whole = attend(query, key, value, mask, 0.2)
    for num in (1, 2, 3, 5):
        with threads(num):
            assert same_bits(attend(query, key, value, mask, 0.2), whole)
            for row in range(3):
                for start, stop in ((0, 1), (5, 8), (17, 26), (3, 60)):
                    got = attend(
                        query[row : row + 1, :, start:stop],
                        key[row : row + 1],
                        value[row : row + 1],
                        mask[row : row + 1, :, start:stop],
                        0.2,
                    )
                    assert same_bits(got, whole[row : row + 1, :, start:stop])


def test_a_query_that_sees_nothing_reads_zeros() -> None:
    heads = some_heads(4, 2, 3, 20, 32, rows=2)
    mask = random_mask(2, 1, 3, 20)
    mask[1, :, 1] = False
    got = attend(*heads, mask, 0.2)
    assert (got[1, :, 1] == 0.0).all()
    assert_reads(got, *heads, mask, 0.2)


def test_what_attention_refuses() -> None:
    query, key, value = some_heads(4, 2, 3, 20, 32)
    mask = random_mask(1, 1, 3, 20)
    assert can_attend(query, key, value, mask)
    query_BHDT, key_BJDS = (part.transpose(2, 3).contiguous() for part in (query, key))
    refused: dict[str, tuple[Any, ...]] = {
        "dtype": (query.float(), key.float(), value.float(), mask),
        "added mask": (query, key, value, mask.float()),
        "mask of heads": (query, key, value, mask.expand(-1, 4, -1, -1)),
        "no keys": (query, key[:, :, :0], value[:, :, :0], None),
        "no queries": (query[:, :, :0], key, value, None),
        "place": tuple(part.to("meta") for part in (query, key, value, mask)),
        "order": (query_BHDT.transpose(2, 3), key, value, mask),
        "order of keys": (query, key_BJDS.transpose(2, 3), value, mask),
        "many": (*some_heads(4, 2, MAX_ATTENDED + 1, 20, 32), None),
        "dim": (*some_heads(4, 2, 3, 20, 48), None),
        "large dim": (*some_heads(4, 2, 3, 20, MAX_HEAD_DIM + 32), None),
    }
    assert [name for name, call in refused.items() if can_attend(*call)] == []
    query.requires_grad_()
    assert not can_attend(query, key, value, mask)
    with torch.no_grad():
        assert can_attend(query, key, value, mask)


def test_what_kernels_refuse_is_read_all_the_same() -> None:
    heads = some_heads(4, 2, 3, 20, 48)
    got = fast_attention(*heads, random_mask(1, 1, 3, 20))
    exact = attention_in_float64(*heads, random_mask(1, 1, 3, 20), 48**-0.5)
    # PyTorch rounds weights to bf16 as well; values are below 4.
    assert_close(got.double(), exact, atol=4 * BF16_STEP, rtol=0)
