"""Drafts by load, in a vLLM whose costs the test knows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moaspec_vllm.load_aware import (
    DRAFTED,
    PLAIN,
    PROMISE,
    LoadAwareDrafts,
    MeasuredSteps,
    StepTimes,
)

LENGTH, MOST = 3, 32
SIZES = (1, 2, 4, 8, 16, 32)


def pass_s(tokens: float) -> float:
    """10 ms for up to 16 tokens and 0.5 ms for each further one."""
    return 0.010 + 0.0005 * max(0, tokens - 16)


def step_s(kind: int, number: int) -> float:
    return pass_s(number) if kind == PLAIN else pass_s(number * (1 + LENGTH)) + 0.002


def times() -> StepTimes:
    measured = MeasuredSteps(
        sizes=SIZES,
        plain_s=tuple(step_s(PLAIN, number) for number in SIZES),
        drafted_s=tuple(step_s(DRAFTED, number) for number in SIZES),
        token_s=0.0001,
    )
    return StepTimes(measured, max_requests=MOST, share=list)


@dataclass
class Steps:
    """Steps of some requests; `accepted`: share of drafts that are right."""

    number: int
    accepted: float = 0.5
    backlog: int = 0
    chooser: LoadAwareDrafts = field(
        default_factory=lambda: LoadAwareDrafts(times(), length=LENGTH, rate=1.0)
    )

    def run(self, number: int) -> Counter[bool]:
        """Whether each of the later half of the steps drafts."""
        found, drafts = Counter[bool](), False
        for step in range(number):
            if drafts:
                right = [
                    sum(
                        (7 * step + 3 * row + place) % 10 < 10 * self.accepted for place in range(3)
                    )
                    for row in range(self.number)
                ]
                self.chooser.count(self.number, sum(right))
            self.chooser.times.count(int(drafts), self.number, step_s(drafts, self.number))
            drafts = not self.chooser.rests(self.number) and self.chooser.choose(
                self.number, self.backlog
            )
            if step >= number // 2:
                found[drafts] += 1
        return found


@pytest.mark.parametrize(("number", "drafts"), [(1, True), (4, True), (32, False)])
def test_few_requests_are_drafted_for_and_many_are_not(number: int, drafts: bool) -> None:
    assert Steps(number).run(60) == {drafts: 30}


def test_drafts_that_stop_being_right_end_and_are_tried_again() -> None:
    steps = Steps(5, 0.0)
    found = steps.run(3000)
    assert found[False] > 1200
    assert found[True] > 0
    steps.accepted = 0.9
    assert steps.run(3000)[True] > 1200


def test_a_step_without_drafts_is_timed_now_and_then() -> None:
    assert Steps(1, 0.9).run(400)[False] == 3


def test_tokens_are_encoded_late_where_that_pays() -> None:
    assert Steps(1, backlog=500).run(20)[True] == 10
    assert Steps(1, backlog=10_000).run(20)[True] == 0


def test_measured_times_replace_those_of_the_start() -> None:
    known = times()
    assert known.seconds(DRAFTED, 16) == pytest.approx(step_s(DRAFTED, 16))
    assert known.seconds(PLAIN, 24) == pytest.approx(pass_s(24))
    for _ in range(200):
        known.count(PLAIN, 1, 0.011)
        known.count(PLAIN, 16, 0.015)
        known.count(DRAFTED, 16, step_s(DRAFTED, 16) + 0.010)
    known.refresh()
    assert known.seconds(PLAIN, 1) == pytest.approx(0.011, rel=0.02)
    assert known.seconds(PLAIN, 16) == pytest.approx(0.015, rel=0.02)
    assert known.seconds(DRAFTED, 16) == pytest.approx(step_s(DRAFTED, 16) + 0.010, rel=0.02)
    # Not seen: the excess of the other kind, then that of the nearest number.
    assert known.seconds(DRAFTED, 1) == pytest.approx(step_s(DRAFTED, 1) + 0.001, rel=0.02)
    assert known.seconds(DRAFTED, 32) == pytest.approx(step_s(DRAFTED, 32) + 0.010, rel=0.02)


def test_one_long_step_changes_little() -> None:
    known = times()
    for long_s in (*[0.010] * 20, 5.0):
        known.count(PLAIN, 4, long_s)
    known.refresh()
    assert known.seconds(PLAIN, 4) < 0.0125


def test_larger_steps_than_those_measured_are_extrapolated() -> None:
    measured = MeasuredSteps(
        sizes=(1, 2, 4), plain_s=(1.0, 1.5, 1.4), drafted_s=(2.0, 3.0, 5.0), token_s=0.0
    )
    table = measured.table_s(8)
    assert table[PLAIN, 1:].tolist() == [1.0, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5]
    assert table[DRAFTED, [3, 4, 8]].tolist() == [4.0, 5.0, 9.0]


@given(
    st.lists(
        st.tuples(st.sampled_from((PLAIN, DRAFTED)), st.integers(1, MOST), st.floats(1e-5, 10.0)),
        max_size=60,
    ),
    st.floats(0.0, 3.0),
    st.integers(1, MOST),
)
def test_drafts_are_chosen_only_where_they_are_expected_to_pay(
    counted: list[tuple[int, int, float]], accepted: float, number: int
) -> None:
    known = times()
    for one in counted:
        known.count(*one)
    known.refresh()
    chooser = LoadAwareDrafts(known, length=LENGTH, rate=0.5)
    chooser.accepted = accepted
    gain = (1 + accepted) * known.seconds(PLAIN, number) / known.seconds(DRAFTED, number)
    assert known.seconds(PLAIN, number) > 0
    assert chooser.choose(number, 0) == (gain >= PROMISE)


def test_all_ranks_decide_by_the_first_ones_times() -> None:
    shared: list[list[float]] = []

    def first(numbers: list[float]) -> list[float]:
        shared.append(numbers)
        return numbers

    ranks = [times(), times()]
    ranks[0]._share, ranks[1]._share = first, lambda _: shared[-1]
    for rank, took_s in zip(ranks, (0.020, 0.028), strict=True):
        for _ in range(8):
            rank.count(PLAIN, 4, took_s)
    assert ranks[0].seconds(PLAIN, 4) == ranks[1].seconds(PLAIN, 4) == pytest.approx(0.020)
