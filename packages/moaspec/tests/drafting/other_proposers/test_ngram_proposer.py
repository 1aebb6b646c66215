"""Prompt lookup."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moaspec
import tiny
from moaspec import Chain, NgramProposer, Tree
from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.drafting.ngram_proposer import NgramIndex
from moaspec_core.drafting.protocols import RequestText
from moaspec_core.errors import InputError


def test_the_longest_suffix_wins_over_a_later_one() -> None:
    text = [1, 2, 3, 40, 41, 9, 3, 50, 51, 1, 2, 3]
    assert NgramProposer().draft(text, Chain(2)).tokens == (40, 41)
    assert NgramProposer(max_ngram=1).draft(text, Chain(2)).tokens == (50, 51)


def test_the_latest_occurrence_of_a_suffix_comes_first() -> None:
    text = [7, 8, 1, 7, 8, 2, 7, 8]
    assert NgramProposer().draft(text, Chain(3)).tokens == (2, 7, 8)


def test_a_broad_shape_gets_several_continuations_merged() -> None:
    text = [7, 8, 1, 5, 7, 8, 1, 6, 7, 8]
    tree = NgramProposer().draft(text, Tree(2, 2, 4))
    assert tree == DraftTree((1, 6, 5), (-1, 0, 0))


def test_total_tokens_is_a_limit() -> None:
    text = [8, 1, 2, 8, 3, 4, 8, 5, 6, 8]
    tree = NgramProposer().draft(text, Tree(2, 3, 3))
    assert tree == DraftTree((5, 6, 3), (-1, 0, -1))


@pytest.mark.parametrize("text", [[1], [1, 2, 3]])
def test_nothing_repeats(text: list[int]) -> None:
    assert NgramProposer().draft(text, Chain(3)) == DraftTree()


def test_a_row_that_goes_on_otherwise_is_looked_up_anew() -> None:
    drafter, shape = NgramProposer(), Tree(2, 2, 4)
    for text in ([7, 8, 1, 5, 7, 8], [7, 8, 1, 9, 7, 8, 1], [7, 8, 2, 7, 8]):
        drafter.rollback(0, 3)
        assert drafter.propose([RequestText(0, text)], shape) == [
            NgramProposer().draft(text, shape)
        ]


def test_min_ngram() -> None:
    assert NgramProposer(min_ngram=2).draft([1, 2, 1], Chain(1)) == DraftTree()


def test_a_repetitive_text_is_decoded_in_fewer_rounds() -> None:
    bias = {3: 60.0, 4: 60.0}
    result = moaspec.generate(
        tiny.target(),
        [3, 4, 3, 4],
        drafter=NgramProposer(),
        tree=Chain(3),
        logit_bias=bias,
        frequency_penalty=0.1,
        max_new_tokens=20,
    )
    plain = moaspec.generate(
        tiny.target(), [3, 4, 3, 4], logit_bias=bias, frequency_penalty=0.1, max_new_tokens=20
    )
    assert result.token_ids == plain.token_ids
    assert result.tau is not None
    assert result.tau > 1.3


@pytest.mark.parametrize("sizes", [(0, 1), (2, 3), (3, 0)])
def test_impossible_sizes(sizes: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="min_ngram"):
        NgramProposer(max_ngram=sizes[0], min_ngram=sizes[1])


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.integers(0, 40),
    st.sampled_from([(4, 3, 2), (2, 1)]),
)
def test_all_earlier_occurrences_are_found(
    text: list[int], cut: int, sizes: tuple[int, ...]
) -> None:
    """Those of longer n-grams first, and of each the later ones, however the text has grown."""
    index = NgramIndex(sizes)
    for part in (text[:cut], text[: cut // 2], text):
        index.extend(part)
    places = [
        place
        for size in sizes
        if len(text) >= size
        for place in range(len(text) - 1, size - 1, -1)
        if text[place - size : place] == text[-size:]
    ]
    assert [*index._matches()] == places


def test_the_garbage_collector_does_not_look_at_an_index() -> None:
    """It stops all threads, for 70 ms where 64 texts had lists of places."""
    gc.collect()
    before, index = len(gc.get_objects()), NgramIndex((4, 3, 2))
    index.extend([number * number % 977 for number in range(2000)])
    gc.collect()
    assert len(gc.get_objects()) - before < 100
