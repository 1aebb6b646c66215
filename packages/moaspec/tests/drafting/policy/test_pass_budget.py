"""The drafts of all rows that one pass verifies."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moaspec
import tiny
from costs import by_cost, table
from moaspec.generation.local_engine import local_engine
from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.drafting.protocols import VerifyRequest, VerifyResult
from moaspec_core.drafting.tree_shapes import Chain, PricedTree, without
from moaspec_core.policy.pass_budget import PassBudget, share_slots

ENCODING = (0.0001, 0.0008, 0.0016, 0.0064)


def chain(*probabilities: float) -> DraftTree:
    """A chain whose nodes are right so often, given that the ones above are."""
    log_p = np.log(probabilities).cumsum()
    parents = range(-1, len(probabilities) - 1)
    return DraftTree(tuple(range(10, 10 + len(log_p))), tuple(parents), log_p=tuple(log_p))


def shared(trees: list[DraftTree], *prices: float) -> list[int]:
    """The drafts that each row keeps at these prices."""
    shape = PricedTree(len(prices), 1, len(prices), prices=prices)
    return [len(tree.tokens) for tree in share_slots(trees, {shape: [*range(len(trees))]})]


def asked(row: int, tree: DraftTree, new: int = 1) -> VerifyRequest:
    return VerifyRequest(row, 50, (1,) * new, tree)


def test_slots_go_to_the_drafts_that_most_probably_survive() -> None:
    trees = [chain(0.5, 0.9), chain(0.95, 0.9, 0.5), chain(0.2, 0.9)]
    # Each slot costs 0.44: 0.5, 0.45, 0.95 and 0.855 are worth more, 0.43 and 0.2 less.
    assert shared(trees, 0.44, 0.88, 1.32) == [2, 2, 0]
    # Two slots are free, each further one costs a token: the rows do not get two each.
    assert shared([chain(0.5, 0.5), chain(0.9, 0.9)], 0.0, 0.0, 1.0, 2.0) == [0, 2]
    assert shared([chain(0.5, 0.5), chain(0.9, 0.9)], 1.0, 2.0) == [0, 0]
    # The last difference goes on.
    assert sum(shared([chain(0.9)] * 8, 0.0, 0.0, 0.5)) == 8
    assert sum(shared([chain(0.9)] * 8, 0.0, 0.0, 1.0)) == 2


@given(
    st.lists(st.lists(st.tuples(st.integers(1, 9), st.integers(-1, 9)), max_size=8), max_size=8),
    st.lists(st.integers(0, 9), min_size=64, max_size=64),
    st.integers(1, 64),
)
def test_the_choice_is_that_of_a_plain_search(
    rows: list[list[tuple[int, int]]], steps: list[int], number: int
) -> None:
    """Any sizes, shapes, ties and prices, the number of prices too."""
    trees = []
    for nodes in rows:
        log_p, parents = list[float](), list[int]()
        for number_of, (tenths, parent) in enumerate(nodes):
            parents.append(min(parent, number_of - 1))
            log_p.append(math.log(tenths / 10) + (log_p[parents[-1]] if parents[-1] >= 0 else 0.0))
        tokens = tuple(range(len(nodes)))
        trees.append(DraftTree(tokens, tuple(parents), log_p=tuple(log_p), levels=len(nodes)))
    prices = (np.cumsum(steps) / 8).tolist()[:number]
    shape = PricedTree(number, 1, number, prices=tuple(prices))
    found = share_slots(trees, {shape: [*range(len(trees))]})
    drafts = sorted(
        (-log_p, row, node)
        for row, tree in enumerate(trees)
        for node, log_p in enumerate(tree.log_p)
    )
    last = (prices[-1] - prices[-2]) if number > 1 else prices[-1]
    prices += [prices[-1] + last * (i + 1) for i in range(len(drafts))]
    gains = np.cumsum([math.exp(-one[0]) for one in drafts]) - prices[: len(drafts)]
    best = int(gains.argmax()) + 1 if len(drafts) and gains.max() > 0 else 0
    kept = {(row, node) for _, row, node in drafts[:best]}
    if sum(bool(tree.tokens) for tree in trees) > 1:
        assert [
            [(row, token) in kept for token in tree.tokens] for row, tree in enumerate(trees)
        ] == [
            [token in found[row].tokens for token in tree.tokens] for row, tree in enumerate(trees)
        ]
        for old, new in zip(trees, found, strict=True):
            cut = {node for node in range(len(old.tokens)) if node not in new.tokens}
            assert (new, new.log_p) == (without(old, cut), without(old, cut).log_p)


def test_a_row_alone_and_fixed_shapes_stay_whole() -> None:
    tree = chain(0.1, 0.1)
    dear = PricedTree(2, 1, 2, prices=(1.0, 2.0))
    assert share_slots([tree, DraftTree()], {dear: [0]})[0] is tree
    assert share_slots([tree, tree], {Tree(2, 1, 2): [0, 1]}) == [tree, tree]
    unknown = [DraftTree((1,), (-1,))] * 2
    assert share_slots(unknown, {dear: [0, 1]}) == unknown
    (*dropped, kept) = share_slots([tree] * 3, {dear: [0, 1], Chain(2): [2]})
    assert [len(one.tokens) for one in (*dropped, kept)] == [0, 0, 2]


def test_full_passes_verify_and_encode_less() -> None:
    """A pass over eight tokens costs as much as one over a single token, here."""
    budget = PassBudget(table())
    good, bad = chain(0.9, 0.9), chain(0.3, 0.3)
    few = budget.applied([asked(0, good), asked(1, bad)])
    assert [len(one.tree.tokens) for one in few] == [2, 2]
    many = budget.applied([asked(row, bad if row else good) for row in range(16)])
    assert not any(one.tree.tokens or one.encode for one in many)
    beside_prompt = budget.applied([asked(0, good), asked(1, DraftTree(), new=64)])
    assert [len(one.tree.tokens) for one in beside_prompt] == [2, 0]
    assert all(one.encode for one in beside_prompt)
    alone = [asked(0, chain(*[0.5] * 20))]
    assert budget.applied(alone) == alone


def test_drafts_of_a_device_go_by_its_earlier_ones() -> None:
    """Siblings by their order, because devices send no probabilities."""
    budget, tree = PassBudget(table(), 0.5), DraftTree((1, 2, 3), (-1, -1, 0))
    # Exact but for the rounding of float64.
    assert [*map(math.exp, budget._log_p(asked(0, tree)))] == pytest.approx([0.5, 0.25, 0.25])
    for _ in range(40):
        budget.count(asked(0, tree), VerifyResult((0, 2), 9))
        budget.count(asked(1, tree), VerifyResult((), 9))
    requests = [asked(row, tree) for row in range(4)]
    assert [len(one.tree.tokens) for one in budget.applied(requests)] == [2, 0, 1, 1]
    tried = [len(budget.applied(requests)[1].tree.tokens) for _ in range(200)]
    assert any(tried), "a device whose drafts were bad once is never verified again"
    budget.forget(1)
    assert [len(one.tree.tokens) for one in budget.applied(requests)] == [2, 1, 1, 1]


@pytest.mark.parametrize("lags", [False, True])
@pytest.mark.parametrize(("dear", "room"), [(1, 200), (100, 34)])
def test_what_was_left_out_is_encoded_where_it_pays(dear: int, room: int, lags: bool) -> None:
    """Nothing beside many rows, no probes either; all when they have ended, if that pays."""
    costs = table(encode_s=tuple(dear * seconds for seconds in ENCODING))
    policy = by_cost(costs, 0.6, lags=lags)
    policy.begin(20, room, 16, length=20, window=0)
    for number in range(30):
        assert not policy.wants_features
        assert policy.shape(20 + number, 16) is None
        policy.record_round(DraftTree(), [])
    assert policy.lost_s == 0.0
    assert policy.shape(50, 1) is None
    assert policy.wants_features == (dear == 1)
    policy.record_round(DraftTree(), [])
    assert policy.lost_s == pytest.approx(float(costs.accept_s(51)) if dear == 1 else 0.0)
    assert (policy.shape(51, 1) is not None) == (dear == 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("agrees", [False, True])
def test_texts_stay_while_rows_come_and_go(temperature: float, agrees: bool) -> None:
    target = tiny.target()
    drafter = tiny.agreeing_drafter("llama") if agrees else tiny.random_drafter(target)
    sampling = moaspec.SamplingParams(temperature=temperature, seed=5).resolved()
    texts = []
    for engine in (local_engine(target), local_engine(target, drafter)):
        handles = [
            engine.add(
                tiny.PROMPTS[number % 4],
                max_new_tokens=6 if number else 48,
                sampling=sampling,
                shape=by_cost(table(encode_s=ENCODING), 0.7),
            )
            for number in range(16)
        ]
        results = [engine.result(handle) for handle in handles]
        while engine.num_active:
            engine.step()
        texts.append([result.token_ids for result in results])
    assert texts[0] == texts[1]
    assert [result.num_drafted > 0 for result in results] == [True] + 15 * [False]
