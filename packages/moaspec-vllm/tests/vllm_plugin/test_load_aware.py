"""Drafts by load, in a vLLM whose costs the test knows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from moaspec_core.policy.cost_model import CostTable
from moaspec_vllm.load_aware import Candidate, LoadAwareDrafts, Plan, StepCosts

LONGEST, MOST = 3, 32


def pass_s(tokens: int) -> float:
    """10 ms for up to 16 tokens and 0.5 ms for each further one."""
    return 0.010 + 0.0005 * max(0, tokens - 16)


def table() -> CostTable:
    tokens = (1, 2, 4, 8, 16, 32, 64, 128)
    return CostTable(
        contexts=(1,),
        tokens=tokens,
        pass_s=(tuple(map(pass_s, tokens)),),
        head_s=(0.0,) * len(tokens),
        root_s=0.0005,
        widths=(1, 32),
        step_s=(0.0005, 0.001),
        encode_s=tuple(0.0001 * one for one in tokens),
    )


@dataclass
class Steps:
    """Steps of some requests; `accepted`: share of drafts that are right, by request."""

    accepted: dict[str, float]
    chooser: LoadAwareDrafts = field(
        default_factory=lambda: LoadAwareDrafts(
            StepCosts(table(), max_requests=MOST, longest=LONGEST, share=list),
            longest=LONGEST,
            rate=1.0,
        )
    )
    backlog: int = 0
    left: int = 500
    # Plans and drafted requests of the later half of the last steps.
    lengths: Counter[int] = field(default_factory=Counter)
    drafted: Counter[str] = field(default_factory=Counter)

    def run(self, number: int) -> Counter[int]:
        self.lengths.clear()
        self.drafted.clear()
        names, plan = list(self.accepted), Plan()
        for step in range(number):
            for row in plan.rows:
                right = sum(
                    (7 * step + 3 * place) % 10 < 10 * self.accepted[names[row]]
                    for place in range(plan.depth)
                )
                self.chooser.count(names[row], plan.depth, right)
            drafts = len(plan.rows) * plan.depth
            seconds = pass_s(len(names) + drafts)
            self.chooser.costs.count_pass(len(names), drafts, seconds, 0.001)
            plan = Plan()
            if not self.chooser.rests(len(names)):
                candidates = [Candidate(row, name, self.left) for row, name in enumerate(names)]
                plan = self.chooser.choose(candidates, len(names), lambda _: self.backlog)
            if step >= number // 2:
                self.lengths[plan.depth] += 1
                self.drafted.update(names[row] for row in plan.rows)
        return self.lengths


def requests(number: int, accepted: float = 0.5) -> dict[str, float]:
    return {str(index): accepted for index in range(number)}


@pytest.mark.parametrize(("number", "length"), [(1, 3), (4, 3), (32, 0)])
def test_more_requests_get_shorter_drafts(number: int, length: int) -> None:
    assert Steps(requests(number)).run(60) == {length: 30}


def test_drafts_that_stop_being_right_end_and_are_tried_again() -> None:
    steps = Steps(requests(5, 0.0))
    assert steps.run(3000)[0] > 1200
    assert sum(steps.lengths[depth] for depth in (1, 2, 3)) > 0
    steps.accepted = requests(5, 0.9)
    assert steps.run(3000)[3] > 1200


def test_slots_go_to_the_requests_whose_drafts_are_right() -> None:
    steps = Steps(requests(6, 0.0) | {"good": 0.9})
    steps.run(400)
    good = steps.drafted.pop("good")
    assert good > 190
    assert max(steps.drafted.values()) < good / 2


def test_tokens_are_encoded_late_only_for_requests_that_go_on() -> None:
    assert Steps(requests(1)).run(20)[3] == 10
    assert Steps(requests(1), backlog=10_000).run(20)[0] == 10
    assert Steps(requests(1), backlog=500).run(20)[3] == 10
    assert Steps(requests(1), backlog=500, left=2).run(20)[0] == 10


def seconds(costs: StepCosts, num_requests: int, num_drafts: int) -> float:
    return float(costs.pass_s(num_requests, np.array([num_drafts]))[0])


def test_measured_times_replace_those_of_the_start() -> None:
    costs = StepCosts(table(), max_requests=MOST, longest=LONGEST, share=list)
    assert seconds(costs, 16, 32) == pytest.approx(pass_s(48))
    for _ in range(200):
        costs.count_pass(1, 0, 0.011, 0.002)
        costs.count_pass(16, 0, 0.015, 0.002)
        costs.count_pass(16, 16, 0.015 + 2 * 0.008, 0.002)
        costs.count_draft(2, 1, 0.002)
        costs.count_encode(10, 0.004)
    costs.refresh()
    assert costs.rest_s == 0.002
    assert seconds(costs, 1, 0) == pytest.approx(0.011, rel=0.02)
    assert seconds(costs, 16, 0) == pytest.approx(0.015, rel=0.02)
    assert seconds(costs, 16, 16) == pytest.approx(0.031, rel=0.05)
    # As many drafts, fewer requests.
    assert seconds(costs, 8, 8) == pytest.approx(pass_s(16) + 0.031 - pass_s(32), rel=0.05)
    assert costs.draft_s[1, 1] == pytest.approx(0.002)
    assert costs.token_s == pytest.approx(0.0004)


def test_one_long_step_changes_little() -> None:
    costs = StepCosts(table(), max_requests=MOST, longest=LONGEST, share=list)
    for long_s in (*[0.010] * 20, 5.0):
        costs.count_pass(4, 0, long_s, 0.0)
    costs.refresh()
    assert seconds(costs, 4, 0) < 0.0111


def test_all_ranks_decide_by_the_first_ones_times() -> None:
    shared: list[list[float]] = []

    def first(numbers: list[float]) -> list[float]:
        shared.append(numbers)
        return numbers

    def other(_: list[float]) -> list[float]:
        return shared[-1]

    ranks = [
        StepCosts(table(), max_requests=MOST, longest=LONGEST, share=share)
        for share in (first, other)
    ]
    for rank, took_s in zip(ranks, (0.020, 0.050), strict=True):
        for _ in range(8):
            rank.count_pass(4, 0, took_s, 0.0)
    assert seconds(ranks[0], 4, 0) == seconds(ranks[1], 4, 0) == pytest.approx(0.020)
