"""Candidates out of the text itself, beside the drafter's."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import moaspec
import moaspec.generation.local_engine
import tiny
from costs import table
from moaspec import Chain, GenerationResult, NgramProposer, SamplingParams, Tree
from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.drafting.ngram_proposer import NgramIndex
from moaspec_core.drafting.tree_shapes import merged
from moaspec_core.policy.cost_model import KnownCosts
from moaspec_core.policy.ngram_branches import COPY_RATES, SIZES, NgramBranches

pytestmark = pytest.mark.kernels

LOOP: dict[str, Any] = {"logit_bias": {3: 60.0, 4: 60.0, 5: 60.0}, "frequency_penalty": 0.1}
"""Settings that make the tiny target repeat itself."""


@given(st.lists(st.integers(0, 3), max_size=40), st.data())
def test_an_index_that_grew_is_one_that_was_built_at_once(
    text: list[int], data: st.DataObject
) -> None:
    grown, whole = NgramIndex(SIZES), NgramIndex(SIZES)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=4))
    for cut in [*sorted(cuts), len(text)]:
        grown.extend(text[:cut])
    whole.extend(text)
    shape = Tree(3, 2, 6)
    assert grown.paths(shape) == whole.paths(shape)
    for path in whole.paths(shape):
        size = len(path)
        assert any(tuple(text[i : i + size]) == path for i in range(len(text)))
    lengths = [
        next(n for n in range(i + 1) if n == i or text[i - 1 - n] != text[-1 - n])
        for i in range(1, len(text))
    ]
    longest = max(lengths, default=0)
    assert whole.longest(3, 6)[0] == (min(longest, 6) if longest > 1 else 0)


def test_an_index_finds_the_longest_end_of_the_text() -> None:
    index = NgramIndex(SIZES)
    index.extend([1, 2, 3, 4, 9, 5, 3, 4, 7, 2, 3, 4])
    assert index.longest(2, 8) == (3, (9, 5))
    assert index.longest(9, 2) == (2, (7, 2, 3, 4))  # both have two: the later place counts
    index.extend([1, 2, 3, 4, 9, 5, 3, 4, 7, 2, 3, 4, 8])
    assert index.longest(2, 8) == (0, ())


LOOKED_UP = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4]


def looked_up(text: list[int], depth: int = 8) -> tuple[NgramBranches, float]:
    """The branches of a text on a machine whose first seven drafts cost nothing."""
    branches = NgramBranches(KnownCosts(table()))
    return branches, branches.look_up(text, 1, depth)


def test_a_copied_path_is_as_long_as_it_pays() -> None:
    branches, promised = looked_up(LOOKED_UP)
    tree = branches.joined(DraftTree())
    assert (tree.tokens, tree.num_copied) == ((5, 6, 1, 2, 3, 4), 6)
    assert promised == pytest.approx(sum(map(math.exp, tree.log_p)))
    assert looked_up(LOOKED_UP, depth=2)[0].joined(DraftTree()).tokens == (5, 6)
    nothing, promised = looked_up([1, 2, 3, 4])
    assert (nothing.joined(DraftTree()), promised) == (DraftTree(), 0.0)
    over, promised = looked_up(LOOKED_UP, depth=0)
    assert (over.joined(DraftTree()), promised) == (DraftTree(), 0.0)
    dear = table(pass_s=((0.01, 0.50, 1.00, 4.00),) * 2)
    branches = NgramBranches(KnownCosts(dear))
    assert branches.look_up(LOOKED_UP, 1, 8) == 0.0
    assert branches.joined(DraftTree()).tokens == ()
    branches = NgramBranches(KnownCosts(table()))
    assert branches.look_up(LOOKED_UP, 2, 8) == 0.0  # beside another row
    assert branches.joined(DraftTree()).tokens == ()


def test_drafts_and_copies_share_their_probabilities() -> None:
    """The copied token becomes more probable, the others less, and of all nodes the best stay."""
    branches, _ = looked_up(LOOKED_UP, depth=2)
    drafts = DraftTree((5, 7, 8), (-1, -1, 1), levels=2, log_p=(-1.0, -1.2, -1.3))
    tree = branches.joined(drafts)
    first, later = next((one, more) for least, one, more in COPY_RATES if least <= 4)
    p = dict(zip(tree.tokens, map(math.exp, tree.log_p), strict=True))
    assert (tree.tokens, tree.parents, tree.num_copied) == ((5, 7, 8, 6), (-1, -1, 1, 0), 1)
    assert p[5] == pytest.approx(first + (1 - first) * math.exp(-1.0))
    assert p[6] == pytest.approx(later * p[5])
    assert p[7] == pytest.approx((1 - first) * math.exp(-1.2))
    assert p[8] == pytest.approx((1 - first) * math.exp(-1.3))
    dear = NgramBranches(KnownCosts(table(pass_s=((0.01, 0.03, 0.05, 0.21),) * 2)))
    assert dear.look_up(LOOKED_UP, 1, 2) > 0
    assert dear.joined(drafts).tokens == (5, 6)  # 7 and 8 cost more than they promise
    unknown = DraftTree((5, 7), (-1, -1))
    assert branches.joined(unknown) == DraftTree((5, 7, 6), (-1, -1, 0), num_copied=1)


def test_wrong_copies_become_rare() -> None:
    branches = NgramBranches(KnownCosts(table()))
    text, promised = [*LOOKED_UP], []
    for number in range(60):
        text += [100 + number, 1, 2, 3, 4]  # never what followed before
        promised.append(branches.look_up(text, 1, 1))
    assert promised[0] > 0.5
    assert promised == sorted(promised, reverse=True)
    assert promised[-1] < 0.3 * promised[0]


def test_copies_share_the_drafters_beginnings() -> None:
    drafts = DraftTree((5, 6, 7), (-1, 0, -1))
    tree = merged([(5, 6, 8), (5, 9), (5, 6)], 10, drafts)
    assert tree == DraftTree((5, 6, 7, 8, 9), (-1, 0, -1, 1, 0), num_copied=2)
    assert merged([(1, 2, 3)], 4, drafts) == DraftTree((5, 6, 7, 1), (-1, 0, -1, -1), 1)
    assert merged([], 4, drafts) == drafts


def test_depths_and_ancestors_of_a_merged_tree() -> None:
    tree = merged([(5, 6, 8)], 9, DraftTree((5, 6), (-1, 0)))
    assert tree.depths == [1, 2, 3]


def results(
    *, free_branches: bool, drafter: Any, sampling: dict[str, Any], tree: Tree
) -> list[GenerationResult]:
    return moaspec.generate(
        tiny.target(),
        [*tiny.PROMPTS, (3, 4, 5, 3, 4, 5, 3, 4)],
        drafter=drafter,
        free_branches=free_branches,
        tree=tree,
        max_new_tokens=20,
        **sampling,
    )


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [{}, LOOP, {"temperature": 0.7, "seed": 4, **LOOP}], ids=str)
@pytest.mark.parametrize("who", ["moa", "lookup", "nobody"])
def test_free_branches_never_change_the_text(who: str, sampling: dict[str, Any]) -> None:
    drafters = {
        "moa": tiny.random_drafter(tiny.target()),
        "lookup": NgramProposer(),
        "nobody": None,
    }
    plain = results(free_branches=False, drafter=None, sampling=sampling, tree=Chain(1))
    for shape in (Chain(2), Tree(2, 2, 4)):
        got = results(free_branches=True, drafter=drafters[who], sampling=sampling, tree=shape)
        assert [one.token_ids for one in got] == [one.token_ids for one in plain]
        for one in got:
            assert one.sources.count("copy") == one.num_copied
            assert sum(one.accept_lengths) == len(one.token_ids) - 1
            assert len(one.copied_lengths) == one.num_rounds
    if sampling and who != "lookup":
        assert sum(one.num_copied for one in got) > 10


@pytest.mark.slow
def test_copies_are_reported_apart() -> None:
    (one,) = results(free_branches=True, drafter=None, sampling=LOOP, tree=Chain(1))[-1:]
    assert one.num_drafted == 0
    assert one.acceptance_by_depth == []
    assert one.tau is not None
    assert one.tau > 1.2
    assert one.tau_without_copies == 1.0


@pytest.mark.parametrize("family", ["phi3", "gemma3_text"])
def test_families_with_windows_and_switches(family: str) -> None:
    target = tiny.target(family)
    prompt = (3, 4, 5, 3, 4, 5, 3)
    sampling = SamplingParams(**LOOP)
    texts = []
    for branches in (None, Tree(5, 2, 8)):
        engine = moaspec.generation.local_engine.local_engine(target)
        handle = engine.add(prompt, max_new_tokens=30, free_branches=branches, sampling=sampling)
        result = engine.result(handle)
        while engine.num_active:
            engine.step()
        texts.append(result.token_ids)
    assert texts[0] == texts[1]
    assert result.num_copied > 5


def test_branches_end_with_the_context() -> None:
    target = tiny.fresh_target(max_position_embeddings=14)
    prompt = (3, 4, 5, 3, 4, 5, 3, 4)
    plain = moaspec.generate(target, prompt, max_new_tokens=40, **LOOP)
    got = moaspec.generate(
        target,
        prompt,
        free_branches=True,
        max_new_tokens=40,
        **LOOP,
    )
    assert got.token_ids == plain.token_ids
    assert got.stop_reason == "context"
