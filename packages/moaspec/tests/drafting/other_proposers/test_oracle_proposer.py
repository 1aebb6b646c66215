"""The replay drafter, and drafters in general as `generate` takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moaspec
import tiny
from moaspec import Chain, OracleProposer, Tree
from moaspec.sampling.noise import uniform
from moaspec_core.drafting.draft_tree import DraftTree, ancestor_matrix
from moaspec_core.errors import InputError

pytestmark = pytest.mark.kernels

TEXT = list(range(10, 60))


def test_a_right_path_with_wrong_siblings() -> None:
    tree = OracleProposer([TEXT]).draft(TEXT[:4], Tree(2, 3, 6))
    assert tree == DraftTree((12, 11, 14, 13, 12, 15), (-1, -1, -1, 2, 2, 2))
    assert OracleProposer([TEXT]).draft(TEXT[:4], Chain(3)).tokens == (14, 15, 16)


def test_total_tokens_is_a_limit() -> None:
    tree = OracleProposer([TEXT]).draft(TEXT[:4], Tree(3, 3, 4))
    assert len(tree.tokens) == 4
    assert ancestor_matrix(tree.parents)[-1].sum() == 3


def test_each_depth_is_right_with_its_probability() -> None:
    texts = [[first, *range(1000)] for first in range(5)]
    drafter = OracleProposer(texts, agreement=(0.8, 0.3), seed=5)
    hits = [0, 0, 0]
    total = 0
    for text in texts[:1]:
        for length in range(1, 900):
            right = text[length : length + 3]
            drafted = drafter.draft(text[:length], Chain(3)).tokens
            hits = [h + (a == b) for h, a, b in zip(hits, right, drafted, strict=True)]
            total += 1
    # Standard error at 900 draws: 0.013 and 0.015; five of them.
    assert abs(hits[0] / total - 0.8) < 0.075
    assert abs(hits[1] / total - 0.3) < 0.075
    assert abs(hits[2] / total - 0.3) < 0.075
    again = OracleProposer(texts, agreement=(0.8, 0.3), seed=5)
    assert again.draft(texts[0][:50], Chain(3)) == drafter.draft(texts[0][:50], Chain(3))


def test_unknown_texts_get_no_drafts() -> None:
    assert OracleProposer([TEXT]).draft([1, 2], Chain(3)) == DraftTree()
    assert OracleProposer([TEXT]).draft(TEXT, Chain(3)) == DraftTree()


@pytest.mark.parametrize("agreement", [(), -0.1, 1.1, (0.5, 2.0)])
def test_impossible_agreement(agreement: Any) -> None:
    with pytest.raises(InputError, match="agreement"):
        OracleProposer([TEXT], agreement=agreement)


def test_generate_takes_any_drafter() -> None:
    own = tiny.own_texts("llama")[0]
    result = moaspec.generate(
        tiny.target(),
        tiny.PROMPTS[0],
        drafter=OracleProposer([[*tiny.PROMPTS[0], *own]]),
        tree=Chain(3),
        max_new_tokens=tiny.NEW_TOKENS,
    )
    assert tuple(result.token_ids) == own
    assert result.tau is not None
    assert result.tau > 3


def test_generate_refuses_what_is_no_drafter() -> None:
    bad: Any = object()
    with pytest.raises(InputError, match="lacks needs, encode"):
        moaspec.generate(tiny.target(), [1], drafter=bad)
    with pytest.raises(InputError, match="num_target_layers"):
        moaspec.generate(tiny.target(), [1], drafter=OracleProposer([]), num_target_layers=1)


def test_draws_do_not_depend_on_how_many_are_made_at_once() -> None:
    shares, seed = (0.5, 0.7, 0.3), 7
    replay, text = OracleProposer([range(5000)], agreement=shares, seed=seed), list(range(5000))
    for position in (1, 1022, 1023, 1024, 4000):
        for depth in (2, 4, 3):  # a deeper one comes between
            tree = replay.draft(text[:position], Chain(depth))
            drawn = [
                float(uniform(*map(torch.tensor, (seed, 0, position + level, level))))
                for level in range(depth)
            ]
            right = [one < shares[min(i, 2)] for i, one in enumerate(drawn)]
            assert [a == b for a, b in zip(tree.tokens, text[position:], strict=False)] == right
