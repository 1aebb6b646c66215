"""TreeProposer by levels: what is drafted on, and what is kept."""

from __future__ import annotations

import math

import pytest
import torch

import moaspec
import tiny
from moaspec.backends.fast_moa_proposer import FastMoAProposer
from moaspec.drafting.moa_proposer import MoAProposer
from moaspec.drafting.tree_proposer import CandidateNodes, best_nodes
from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.drafting.protocols import RequestText
from moaspec_core.drafting.tree_shapes import Chain, PricedTree

FREE = tuple(0.0 for _ in range(14))


def drafting() -> MoAProposer:
    target = tiny.target()
    return FastMoAProposer(tiny.agreeing_drafter("llama"), target)


def proposed(shape: Tree, prompts: list[list[int]]) -> list[DraftTree]:
    inner, target = drafting(), tiny.target()
    rows = []
    for row, prompt in enumerate(prompts):
        known = torch.tensor([prompt[:-1]])
        kv_1TLK = target.capture(known, torch.ones_like(known)).kv_BTLK
        (features,) = inner.encode(kv_1TLK, torch.arange(known.shape[1])[None], [known.shape[1]])
        inner.append_features(row, features)
        rows.append(RequestText(row, prompt))
    return inner.propose(rows, shape)


PROMPTS = [list(prompt) for prompt in tiny.PROMPTS]


def test_free_drafts_are_the_whole_tree() -> None:
    tree = Tree(3, 2, 10)
    free = PricedTree(3, 2, 10, prices=FREE[:10])
    assert proposed(free, PROMPTS) == proposed(tree, PROMPTS)


def test_levels_end_where_no_row_is_sure_enough() -> None:
    trees = proposed(PricedTree(4, 2, 14, prices=FREE, least=1.0), PROMPTS)
    assert {tree.levels for tree in trees} == {1}
    assert {len(tree.tokens) for tree in trees} == {2}


@pytest.mark.parametrize("least", [0.0, 0.05, 0.2, 0.5])
def test_rows_together_keep_what_they_keep_alone(least: float) -> None:
    shape = PricedTree(4, 2, 14, prices=tuple(0.02 * n for n in range(14)), least=least)
    alone = [proposed(shape, [prompt])[0] for prompt in PROMPTS]
    together = proposed(shape, PROMPTS)
    for one, other in zip(alone, together, strict=True):
        # A row that is less sure gets the levels of the surest; what they have pays all the same.
        assert other.levels >= one.levels
        assert set(paths(one)) <= set(paths(other))


def test_dear_drafts_are_left_out() -> None:
    (tree,) = proposed(PricedTree(2, 2, 6, prices=(9.0,) * 6), PROMPTS[:1])
    assert tree == DraftTree(levels=2, num_expanded=2)


def test_a_kept_draft_keeps_those_above_it() -> None:
    grown = CandidateNodes(
        tokens=[5, 6, 7, 8],
        parents=[-1, -1, 1, 2],
        scores=[math.log(p) for p in (0.2, 0.7, 0.7, 0.6)],  # a sure child ties with its parent
        levels=3,
        num_expanded=2,
    )
    assert best_nodes(grown, Tree(3, 2, 3)) == DraftTree(
        (6, 7, 8), (-1, 0, 1), levels=3, num_expanded=2
    )
    assert best_nodes(grown, Tree(3, 2, 4)).tokens == (5, 6, 7, 8)
    assert best_nodes(grown, Chain(1)).tokens == (6,)


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def test_texts_are_the_targets_own() -> None:
    target = tiny.target()
    shape = PricedTree(4, 2, 14, prices=tuple(0.02 * n for n in range(14)), least=0.05)
    for drafter in (tiny.agreeing_drafter("llama"), tiny.random_drafter(target)):
        results = moaspec.generate(
            target, PROMPTS, drafter=drafter, tree=shape, max_new_tokens=tiny.NEW_TOKENS
        )
        texts = tuple(tuple(result.token_ids) for result in results)
        assert texts == tuple(tiny.own_texts("llama"))
