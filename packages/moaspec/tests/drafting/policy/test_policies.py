"""Policies: what they draft on easy, hopeless and changing texts, and what that costs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

import moaspec
import tiny
from costs import by_cost, table
from moaspec.generation.local_engine import local_engine
from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.drafting.tree_shapes import DEFAULT_TREE, Chain
from moaspec_core.errors import InputError, ShapeError
from moaspec_core.policy.cost_model import MAX_DEPTH, KnownCosts
from moaspec_core.policy.policies import (
    COPIES,
    CREDIT_TOKENS,
    FIRST_WINDOW,
    LEAST_WINDOW,
    MAX_LOSS,
    PROVEN_ROUNDS,
    AdaptivePolicy,
    DraftSettings,
)
from moaspec_core.sampling.params import SamplingParams

ENCODING = (0.0001, 0.0008, 0.0016, 0.0064)
"""Encoding at 1% of a plain round per token."""


def path(shape: Tree) -> DraftTree:
    """A chain of the shape's depth, and siblings of its first node."""
    siblings = min(shape.breadth - 1, shape.total_tokens - shape.depth)
    parents = [*range(-1, shape.depth - 1), *[-1] * siblings]
    return DraftTree(tuple(range(len(parents))), tuple(parents))


def play(
    policy: AdaptivePolicy, rounds: int, rate: Callable[[int], float], seed: int = 0
) -> list[Tree | None]:
    """Rounds in which each draft is right with a probability that may change."""
    draws = random.Random(seed)
    shapes = []
    for number in range(rounds):
        shape = policy.shape(100 + number, 1)
        shapes.append(shape)
        tree = DraftTree() if shape is None else path(shape)
        accepted = []
        for node in range(0 if shape is None else shape.depth):
            if draws.random() >= rate(number):
                break
            accepted.append(node)
        policy.record_round(tree, accepted)
    return shapes


def test_good_drafts_are_kept_up() -> None:
    policy = by_cost(table(), 0.5)
    shapes = play(policy, 100, lambda _: 0.95)
    assert None not in shapes
    assert policy.lost_s < 0


def test_trees_are_as_large_as_the_row_may_lose() -> None:
    """A new row risks little; one that has gained by its drafts may have the whole tree."""
    costs = table(pass_s=((0.01, 0.02, 0.04, 0.16), (0.01, 0.02, 0.04, 0.16)))
    policy = by_cost(costs, 0.9)
    shapes = play(policy, 60, lambda _: 0.95)
    first, last = shapes[0], shapes[-1]
    assert first is not None
    assert last is not None
    assert first.total_tokens < last.total_tokens
    assert first.depth < last.depth == MAX_DEPTH


@pytest.mark.parametrize("prior", [0.02, 0.3, 0.9])
@pytest.mark.parametrize("encode_s", [(0.0,) * 4, ENCODING, tuple(4 * s for s in ENCODING)])
@pytest.mark.parametrize("lags", [False, True])
def test_hopeless_drafts_cost_at_most_what_is_tolerated(
    prior: float, encode_s: tuple[float, ...], lags: bool
) -> None:
    policy = by_cost(table(encode_s=encode_s), prior, lags=lags)
    shapes: list[Tree | None] = []
    for _ in range(100):
        shapes += play(policy, 20, lambda _: 0.0)
        credit_s = MAX_LOSS * CREDIT_TOKENS * table().plain_s(100)
        # A long text is dearer per token than the first context; this one stays at it.
        assert policy.lost_s <= MAX_LOSS * policy.plain_s + 1.1 * credit_s
    probes = [i for i, shape in enumerate(shapes) if shape is not None]
    early, late = (sum(i in part for i in probes) for part in (range(1000), range(1000, 2000)))
    assert 0 < early < 60
    assert late <= min(early, 8)


@pytest.mark.parametrize("lags", [False, True])
def test_a_text_that_becomes_easy_is_noticed(lags: bool) -> None:
    policy = by_cost(table(), 0.3, lags=lags)
    shapes = play(policy, 1500, lambda number: 0.0 if number < 300 else 0.95)
    assert shapes[250:300].count(None) > 45
    assert shapes[-50:].count(None) < 5


def test_what_a_prompt_took_to_encode_is_owed() -> None:
    """Once the row has written enough, all of it is at most the tolerated share."""
    costs = table(encode_s=ENCODING)
    policy = by_cost(costs, 0.9, lags=True)
    policy.begin(64, 2000, 1, length=64, window=0)
    assert policy.lost_s == costs.accept_s(64)
    play(policy, 2000, lambda _: 0.0)
    assert costs.accept_s(64) < policy.lost_s <= MAX_LOSS * policy.plain_s


def test_a_row_that_lags_is_encoded_when_drafts_pay_again() -> None:
    """Encoding everything would take more than is tolerated, so that no other row comes back."""
    dear = tuple(4 * seconds for seconds in ENCODING)
    found = {}
    for lags in (False, True):
        policy = by_cost(table(encode_s=dear), 0.3, lags=lags)
        encoded = []
        for number in range(1500):
            shape = policy.shape(100 + number, 1)
            encoded.append(policy.wants_features)
            tree = DraftTree() if shape is None else path(shape)
            right = 0 if shape is None or number < 300 else shape.depth
            policy.record_round(tree, range(right))
        assert not any(encoded[100:300])
        found[lags] = encoded
    assert not any(found[False][300:])
    assert all(found[True][-50:])


def test_the_same_history_gives_the_same_decisions() -> None:
    runs = [play(by_cost(table(), 0.4), 200, lambda _: 0.5) for _ in range(2)]
    assert runs[0] == runs[1]


def test_nothing_is_encoded_while_nothing_may_be_drafted() -> None:
    policy = by_cost(table(encode_s=ENCODING), 0.01)
    wanted = []
    for _ in range(60):
        shape = policy.shape(50, 1)
        wanted.append((shape is not None, policy.wants_features))
        policy.record_round(DraftTree() if shape is None else path(shape), [])
    drafting = [i for i, (drafted, _) in enumerate(wanted) if drafted]
    # Whatever is drafted in a round, the round before brought the features up to date.
    assert all(wanted[i - 1][1] for i in drafting if i > 0)
    assert [feature for _, feature in wanted].count(True) <= 2 * len(drafting) + 1


DEAR = (0.001, 0.008, 0.1, 1.0)
"""Encoding of 1, 8, 16, 64 tokens: a prompt of 64 takes as long as a hundred plain rounds."""


@pytest.mark.parametrize(
    ("prior", "room", "num_requests", "drafts"),
    [
        (0.9, 1000, 1, True),  # promises to gain it back
        (0.9, 50, 1, False),  # the answer is too short for that
        (0.05, 1000, 1, False),  # drafts gain nothing
        (0.9, 1000, 64, False),  # nor do they where passes are full without them
    ],
)
def test_a_long_prompt_is_encoded_where_drafts_gain_it_back(
    prior: float, room: int, num_requests: int, drafts: bool
) -> None:
    policy = by_cost(table(encode_s=DEAR), prior)
    policy.begin(64, room, num_requests, length=64, window=0)
    assert policy.wants_features is drafts
    assert (policy.shape(64, num_requests) is not None) is drafts


def test_a_long_text_may_lose_what_its_own_rounds_allow() -> None:
    """A prompt of which little must be encoded is judged by the passes after all of it."""
    costs = table(encode_s=(0.018,) * 4)
    found = []
    for length in (64, 1024):  # where a plain round takes 10 and 20 ms
        policy = by_cost(costs, 0.05)
        policy.begin(2, 0, 1, length=length, window=0)
        found.append(policy.wants_features)
    assert found == [False, True]


@pytest.mark.parametrize("window", [0, 16])
def test_no_more_than_a_window_is_owed_after_a_pause(window: int) -> None:
    """The verifier encodes no more than that when drafting goes on."""
    costs = table(encode_s=DEAR)
    policy = by_cost(costs, 0.9)
    policy.begin(64, 1000, 64, length=64, window=window)
    assert not policy.wants_features  # beside so many rows
    for _ in range(40):
        policy.shape(70, 64)
        policy.record_round(DraftTree(), [])
    before_s = policy.lost_s
    policy.shape(110, 1)
    assert policy.wants_features
    policy.record_round(DraftTree(), [])
    encoded = min(window, policy.window) or 105
    assert policy.lost_s - before_s == pytest.approx(float(costs.accept_s(encoded)))


@pytest.mark.parametrize(
    ("accepted", "room", "length", "window", "widened"),
    [
        (2, 2000, 500, 384, True),
        (2, 60, 500, 384, False),  # the rest of the text is too short
        (0, 2000, 500, 384, False),  # drafts do not pay
        (8, 2000, 500, 140, False),  # the text has become half a window longer
        (2, 2000, FIRST_WINDOW, 384, False),  # the whole prompt was encoded
        (2, 2000, 500, FIRST_WINDOW, False),  # and here the drafter's whole window
    ],
)
def test_the_whole_window_is_encoded_where_drafts_have_paid(
    accepted: int, room: int, length: int, window: int, widened: bool
) -> None:
    costs = table(encode_s=(0.0005, 0.001, 0.002, 0.006))
    policy = by_cost(costs, 0.9)
    policy.begin(min(FIRST_WINDOW, window, length), room, 1, length=length, window=window)
    for _ in range(PROVEN_ROUNDS):
        assert policy.window == FIRST_WINDOW
        shape = policy.shape(length, 1)
        right = range(0 if shape is None else min(accepted, shape.depth))
        policy.record_round(DraftTree() if shape is None else path(shape), right)
        length += 1 + len(right)
    before_s = policy.lost_s
    policy.shape(length, 1)
    assert policy.window == (0 if widened else FIRST_WINDOW)
    policy.record_round(DraftTree(), [])
    if widened:
        assert policy.lost_s - before_s > float(costs.accept_s(window)) - 0.01


def test_fewer_tokens_of_a_prompt_are_encoded_where_that_takes_longer() -> None:
    """At most the credit that drafts have, too."""
    credit_s = MAX_LOSS * CREDIT_TOKENS * table().plain_s(1)
    for share, window in ((0.1, FIRST_WINDOW), (1.5, FIRST_WINDOW // 2), (100, LEAST_WINDOW)):
        costs = table(encode_s=tuple(share * credit_s * n / FIRST_WINDOW for n in (1, 2, 4, 64)))
        assert by_cost(costs, 0.9).window == window


@pytest.mark.parametrize("room", [50, 1000])
def test_a_short_prompt_is_always_encoded(room: int) -> None:
    policy = by_cost(table(encode_s=DEAR), 0.05)
    policy.begin(1, room, 1, length=1, window=0)
    assert policy.wants_features


def test_the_engine_says_what_a_prompt_would_take() -> None:
    target = tiny.target()
    engine = local_engine(target, tiny.random_drafter(target))
    policies = [by_cost(table(encode_s=(seconds,) * 4), 0.9) for seconds in (0.0, 100.0)]
    handles = [
        engine.add(tiny.PROMPTS[0], max_new_tokens=tiny.NEW_TOKENS, shape=policy)
        for policy in policies
    ]
    engine.step()
    assert [policy.wants_features for policy in policies] == [True, False]
    list(engine.run())
    cheap, dear = (engine.result(handle) for handle in handles)
    assert tuple(cheap.token_ids) == tuple(dear.token_ids) == tiny.own_texts("llama")[0]
    assert dear.num_drafted == 0


def test_copies_that_promise_more_than_drafts_are_verified_alone() -> None:
    policy = by_cost(table(), 0.6)
    policy.begin(10, 100, 1, length=10, window=0)
    assert policy.shape(10, 1, copied=5.0) is None
    assert policy.wants_features  # so that the next round can draft
    policy.record_round(DraftTree((1, 2), (-1, 0), num_copied=2), [0, 1])
    assert policy.shape(13, 1, copied=0.1) is not None
    for length in range(13, 40):  # bad drafts gain little, so that less is enough
        if policy.shape(length, 1) is not None:
            policy.record_round(DraftTree((1, 2), (-1, 0), levels=2, num_expanded=1), [])
    assert policy.shape(40, 1, copied=0.1) is None


def test_a_text_of_copies_may_be_drafted_for_afterwards() -> None:
    """Copied tokens are encoded, and are tokens of the text: 3% of them may be lost."""
    costs = table(encode_s=ENCODING)
    policy = by_cost(costs, 0.6)
    policy.begin(10, 2000, 1, length=10, window=0)
    copies = DraftTree((1, 2, 3, 4), (-1, 0, 1, 2), num_copied=4)
    for _ in range(200):
        assert policy.shape(60, 1, copied=3.0) is None
        policy.record_round(copies, [0, 1, 2, 3])
    assert policy.plain_s == pytest.approx(200 * 5 * costs.plain_s(60))
    assert policy.shape(60, 1) is not None


def test_rows_that_ask_for_logits_go_by_what_these_cost() -> None:
    costs = table(logits_s=(0.001, 0.020, 0.040, 0.160))
    shaping, sampling = DraftSettings(costs=costs), SamplingParams(temperature=1.0)
    greedy, sampled = shaping.policy(), shaping.policy(sampling)
    assert isinstance(greedy, AdaptivePolicy)
    assert isinstance(sampled, AdaptivePolicy)
    assert costs.with_logits.head_s == costs.logits_s
    first, dearer = greedy.shape(64, 1), sampled.shape(64, 1)
    assert first is not None
    assert dearer is None or dearer.total_tokens < first.total_tokens
    branches = shaping.branches(sampling)
    assert isinstance(branches, KnownCosts)
    assert branches.table == costs.with_logits
    assert table().with_logits == table()  # of before they were measured


def test_settings_without_measurements() -> None:
    assert DraftSettings().policy() == DEFAULT_TREE
    assert DraftSettings().branches() is None
    assert DraftSettings(Chain(3), free_branches=True).branches() == COPIES
    assert DraftSettings("chain:3", costs=table()).policy() == Chain(3)
    assert DraftSettings("chain:3", costs=table()).branches() is None
    assert DraftSettings(costs=table(), free_branches=False).branches() is None
    assert isinstance(DraftSettings(costs=table()).policy(), AdaptivePolicy)
    assert isinstance(DraftSettings(costs=table()).branches(), KnownCosts)


def test_settings_that_do_not_exist() -> None:
    bad: Any = "yes"
    with pytest.raises(InputError, match="free_branches"):
        DraftSettings(free_branches=bad)
    with pytest.raises(ShapeError):
        DraftSettings("bush:3")


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("layers", "lags"), [(0, False), (0, True), (1, False)])
def test_policies_never_change_the_text(temperature: float, layers: int, lags: bool) -> None:
    """Rows that pause, encode late and come back, beside rows of another opinion."""
    target = tiny.target()
    sampling = moaspec.SamplingParams(temperature=temperature, seed=3).resolved()
    texts, hopeless = {}, tiny.random_drafter(target)
    for drafter in (None, tiny.agreeing_drafter("llama", layers), hopeless):
        engine = local_engine(target, drafter, num_target_layers=layers if drafter else None)
        handles = [
            engine.add(
                prompt,
                max_new_tokens=32,
                sampling=sampling,
                shape=by_cost(table(root_s=0.01 if number % 2 else 0.001), 0.6, lags=lags),
                free_branches=KnownCosts(table()) if number > 1 else None,
            )
            for number, prompt in enumerate(tiny.PROMPTS)
        ]
        results = [engine.result(handle) for handle in handles]
        while engine.num_active:
            engine.step()
        texts[drafter] = [result.token_ids for result in results]
        if drafter is hopeless:
            assert all(0 in result.drafted_depths for result in results[1::2])
        if drafter is not None:
            assert any(result.num_drafted for result in results)
    expected, *others = texts.values()
    assert all(other == expected for other in others)
