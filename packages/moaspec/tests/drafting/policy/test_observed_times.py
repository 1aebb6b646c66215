"""The limit of 3% holds by the clock, whatever the cost table says: on simulated machines."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from costs import table
from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.policy.cost_model import CostTable, KnownCosts
from moaspec_core.policy.observed_times import (
    FIRST_COMPARED,
    INTERVAL,
    NEIGHBOURS,
    ObservedTimes,
    RoundTime,
)
from moaspec_core.policy.policies import AdaptivePolicy

ENCODING = (0.0001, 0.0008, 0.0016, 0.0064)
SLOPED = table(
    pass_s=((0.010, 0.012, 0.018, 0.066), (0.020, 0.023, 0.032, 0.086)), encode_s=ENCODING
)
"""A machine on which a round with a few drafts takes some 1.3 times as long as a plain one."""

PROMISED = 1.03
DISPLACED = 0.1
"""Of the time that drafts add to a round, the share that they also add to plain rounds after it."""

CONSTANT = 8.0
"""Plain rounds that a text may lose besides: those in which a wrong table is found out."""


@dataclass
class Machine:
    """A machine with a simulated clock, on which some texts are decoded together.

    Args:
        costs: what rounds really cost.
        slowness: factor on all times, at a time.
        noise: largest share by which other processes make a round longer, by chance.
    """

    costs: CostTable
    slowness: Callable[[float], float] = lambda _: 1.0
    noise: float = 0.0
    seed: int = 0
    now_s: float = 0.0
    plain_s: float = 0.0  # what plain decoding would have taken
    rounds: list[int] = field(default_factory=list)  # tokens that each row's round verified
    _added_s: float = 0.0  # by drafts, in the latest round that had any

    def __post_init__(self) -> None:
        self._draws = random.Random(self.seed)

    def decode(
        self,
        policies: Sequence[AdaptivePolicy],
        tokens: int,
        rate: Callable[[int], float],
        prompt: int = 64,
    ) -> None:
        """Decode `tokens` tokens of each row; each draft is right with a probability."""
        rows = len(policies)
        lengths = [prompt] * rows
        for policy in policies:
            policy.begin(prompt, tokens, rows, length=prompt, window=0)
            if policy.wants_features:
                self._pass(float(self.costs.accept_s(prompt)), 0.0)
        while min(lengths) < prompt + tokens:
            self._round(policies, lengths, lambda: rate(min(lengths) - prompt))

    def _round(
        self, policies: Sequence[AdaptivePolicy], lengths: list[int], rate: Callable[[], float]
    ) -> None:
        times = policies[0].times
        assert times is not None
        times.begin_round(shared=True)
        trees = [
            self._tree(one, length, len(policies)) for one, length in _pairs(policies, lengths)
        ]
        rows, drafts = len(policies), sum(len(tree.tokens) for tree in trees)
        seconds = float(self.costs.verify_s(rows + drafts, lengths[0])) + self.costs.plain_rest_s
        encoding_s = 0.0
        if drafts:
            levels = max(tree.levels for tree in trees)
            seconds += self.costs.draft_s(levels, 1, rows)
            self._added_s = seconds - rows * self.costs.plain_s(lengths[0], rows)
        elif any(self.rounds[-NEIGHBOURS:]):
            seconds += DISPLACED * self._added_s
        plain_s = 0.0
        for i, (policy, tree) in enumerate(zip(policies, trees, strict=True)):
            right = 0
            while right < tree.levels and self._draws.random() < rate():
                right += 1
            if policy.wants_features:
                encoding_s += float(self.costs.accept_s(policy._unencoded + 1 + right))
            plain_s += self.costs.plain_s(lengths[i], rows) * (1 + right)
            lengths[i] += 1 + right
            policy.record_round(tree, range(right))
        self.rounds.append(drafts)
        elapsed_s = self._pass(seconds + encoding_s, plain_s)
        seconds = elapsed_s if drafts else elapsed_s * seconds / (seconds + encoding_s)
        shares = [one.round_s for one in policies]
        expected = [sum(pair) for pair in zip(*shares, strict=True)]
        times.record(RoundTime(self.now_s, seconds, *expected))

    def _tree(self, policy: AdaptivePolicy, length: int, rows: int) -> DraftTree:
        shape = policy.shape(length, rows)
        return DraftTree() if shape is None else _chain(shape)

    def _pass(self, seconds: float, plain_s: float) -> float:
        """Let the clock run; plain decoding would have been slowed alike."""
        slow = self.slowness(self.now_s)
        elapsed_s = seconds * slow * (1.0 + self.noise * self._draws.random() ** 4)
        self.now_s += elapsed_s
        self.plain_s += plain_s * slow * (1.0 + self.noise / 5)
        return elapsed_s


def _pairs(
    policies: Sequence[AdaptivePolicy], lengths: Sequence[int]
) -> list[tuple[AdaptivePolicy, int]]:
    return list(zip(policies, lengths, strict=True))


def _chain(shape: Tree) -> DraftTree:
    """As a drafter with middling probabilities keeps it: at most four levels of one draft."""
    depth = min(shape.depth, 4)
    tokens, parents = tuple(range(depth)), tuple(range(-1, depth - 1))
    return DraftTree(tokens, parents, levels=depth, num_expanded=depth - 1)


def excess(factor: float) -> CostTable:
    """A table that says so many times what drafts add on the machine of `SLOPED`."""
    return SLOPED.with_excess(factor, 1)


def policies(known: CostTable, times: ObservedTimes, rows: int = 1) -> list[AdaptivePolicy]:
    costs = KnownCosts(known, [[0.6]], times)
    return [AdaptivePolicy(costs, lags=True) for _ in range(rows)]


RATES: dict[str, Callable[[int], float]] = {
    "hopeless": lambda _: 0.0,
    "poor": lambda _: 0.3,
    "good": lambda _: 0.9,
    "better": lambda token: 0.0 if token < 300 else 0.9,
    "worse": lambda token: 0.9 if token < 300 else 0.0,
    "in turns": lambda token: 0.9 if token // 50 % 2 else 0.0,
}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("told", [0.1, 1.0, 5.0])
def test_no_text_takes_much_longer_than_plain_decoding(told: float, rate: str, rows: int) -> None:
    """Also where the table says that drafts cost a tenth, or five times, of what they do."""
    for seed, (prompt, tokens) in enumerate(((8, 40), (64, 128), (1000, 100), (64, 700))):
        machine = Machine(SLOPED, seed=seed)
        machine.decode(policies(excess(told), ObservedTimes(), rows), tokens, RATES[rate], prompt)
        lost_s = machine.now_s - PROMISED * machine.plain_s - rows * float(SLOPED.accept_s(prompt))
        assert lost_s <= rows * CONSTANT * SLOPED.plain_s(prompt, rows)


@pytest.mark.parametrize("told", [0.1, 1.0, 5.0])
def test_later_requests_know_what_was_seen(told: float) -> None:
    """Of a drafter that is never right they lose less than 3%, and a good one gains."""
    times, machine = ObservedTimes(), Machine(SLOPED)
    machine.decode(policies(excess(told), times), 500, lambda _: 0.6)
    assert told * times.excess == pytest.approx(1.0, rel=0.15)
    for rate, least, most in (("hopeless", 1.0, PROMISED), ("good", 0.0, 0.75)):
        later = Machine(SLOPED, seed=1, now_s=machine.now_s)
        later.decode(policies(excess(told), times), 600, RATES[rate])
        taken = (later.now_s - machine.now_s) / later.plain_s
        assert least <= taken <= most


@pytest.mark.parametrize("rate", ["hopeless", "poor", "good", "in turns"])
@pytest.mark.parametrize("told", [0.2, 1.0])
def test_a_machine_that_becomes_busy_and_idle_again(told: float, rate: str) -> None:
    """Its rounds take three times as long for a second, again and again, and vary by half."""
    for seed in range(5):
        machine = Machine(
            SLOPED, lambda now_s: 3.0 if int(now_s) % 2 else 1.0, noise=0.5, seed=seed
        )
        machine.decode(policies(excess(told), ObservedTimes()), 1500, RATES[rate])
        assert machine.now_s <= PROMISED * machine.plain_s * 1.02 + 20 * SLOPED.plain_s(64)


def test_a_right_table_is_left_alone() -> None:
    times, machine = ObservedTimes(), Machine(SLOPED, noise=0.3)
    machine.decode(policies(SLOPED, times), 2000, lambda _: 0.9)
    assert times.fits
    # Plain rounds are few where drafts pay.
    assert machine.rounds.count(0) <= FIRST_COMPARED + 2 * len(machine.rounds) / INTERVAL


@pytest.mark.parametrize("told", [0.2, 5.0])
def test_a_table_that_does_not_fit_is_noticed(told: float) -> None:
    times, machine = ObservedTimes(), Machine(SLOPED)
    machine.decode(policies(excess(told), times), 500, lambda _: 0.9)
    assert not times.fits


def test_rounds_that_lie_apart_are_not_compared() -> None:
    """Between them the machine may have become busy."""
    times = ObservedTimes()
    for number in range(40):
        drafted = number % 2
        times.record(RoundTime(60.0 * number, 9.0 if drafted else 1.0, 1.0, 1.0 + drafted))
    assert times.excess == 1.0


def test_nothing_is_recorded_beside_other_rows() -> None:
    times = ObservedTimes()
    times.begin_round(shared=False)
    assert not times.plain_now
    times.begin_round(shared=True)
    assert times.plain_now
    times.begin_round(shared=False)
    assert not times.plain_now


def test_without_times_the_table_decides_alone() -> None:
    policy = AdaptivePolicy(KnownCosts(SLOPED, [[0.6]]))
    policy.begin(8, 100, 1, length=8, window=0)
    assert policy.times is None
    assert policy.shape(8, 1) is not None
    assert KnownCosts(SLOPED).excess == 1.0
