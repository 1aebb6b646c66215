"""How much a device drafts on its link."""

from __future__ import annotations

import pytest

from moaspec.drafting.draft_tree import DraftTree
from moaspec.remote.device.link_policy import (
    MAX_LOSS,
    MAX_MEASURING,
    MAX_PAUSE,
    MIN_PAUSE,
    LinkPolicy,
)
from moaspec.support.limits import MAX_FURTHER


def policy(
    wait_s: float, step_s: float | None, plain_s: float | None, *, ahead: bool = True
) -> LinkPolicy:
    return LinkPolicy(
        wait_s=lambda: wait_s, step_s=lambda: step_s, plain_s=lambda: plain_s, ahead=ahead
    )


def depths(of: LinkPolicy, count: int) -> list[int]:
    """Drafts of these rounds."""
    shapes = (of.shape(10, 1) for _ in range(count))
    return [0 if shape is None else shape.depth for shape in shapes]


def test_drafts_where_they_pay() -> None:
    assert min(depths(policy(0.16, 0.005, 0.15), 40)) > 1


@pytest.mark.parametrize("step_s", [0.2, 0.3, 0.5])
@pytest.mark.parametrize("ahead", [True, False])
def test_no_drafts_where_they_do_not(step_s: float, ahead: bool) -> None:
    """Trials take `MAX_LOSS` of the time, with the round trip after each."""
    plain_s, wait_s = 0.15, 0.2
    of = policy(wait_s, step_s, plain_s, ahead=ahead)
    found = depths(of, 5000)
    assert max(found[:MIN_PAUSE]) == 0
    trials = [depth for depth in found if depth]
    assert set(trials) == {1}
    tokens, round_s = (of_chains[0] for of_chains in of._rounds(wait_s))
    loss_s = len(trials) * (round_s + wait_s - (tokens + 1) * plain_s)
    total_s = plain_s * len(found)
    assert loss_s <= MAX_LOSS * total_s * 1.01


def test_drafts_that_never_pay_are_tried_after_the_longest_pause() -> None:
    found = depths(policy(0.2, 60.0, 0.15), 2 * MAX_PAUSE)
    assert [place for place, depth in enumerate(found) if depth] == [MAX_PAUSE]


def test_a_pause_ends_early_where_drafts_would_pay_by_now() -> None:
    """The tokens that the server already streams come first."""
    waits_s = [9.0]
    of = LinkPolicy(
        wait_s=lambda: waits_s[-1], step_s=lambda: 0.003, plain_s=lambda: 0.05, ahead=True
    )
    assert max(depths(of, 100)) == 0
    asked = of.pause
    assert asked > 4 * MAX_FURTHER
    waits_s.append(0.06)
    places = [place for place, depth in enumerate(depths(of, asked)) if depth]
    assert MAX_FURTHER <= places[0] <= 2 * MAX_FURTHER
    assert places == [*range(places[0], asked)]


def test_the_pause_says_what_follows() -> None:
    of = policy(0.2, 0.5, 0.15)
    before = 0
    for _ in range(1000):
        shape = of.shape(10, 1)
        assert shape is None or (before, of.pause) == (0, 0)
        before = of.pause


def test_a_step_is_measured_before_it_is_needed() -> None:
    assert depths(policy(0.2, None, 0.15), MIN_PAUSE) == [0] * MIN_PAUSE
    assert depths(policy(0.2, None, 0.15, ahead=False), MIN_PAUSE) == [0] * MIN_PAUSE
    assert depths(policy(0.2, None, None), 1) != [0]


@pytest.mark.parametrize("plenty_after", [2 * MIN_PAUSE, 10**6])
def test_few_steps_are_not_decided_by_for_some_time(plenty_after: int) -> None:
    drafts: list[int] = []
    of = LinkPolicy(
        wait_s=lambda: 0.16,
        step_s=lambda: 0.005,
        plain_s=lambda: 0.15,
        measuring=lambda: len(drafts) < plenty_after,
        ahead=True,
    )
    while len(drafts) < 40:
        drafts += depths(of, 1)
    first = min(plenty_after, 2 * MAX_MEASURING * MIN_PAUSE)
    assert max(drafts[:first]) == 0
    assert min(drafts[first:]) > 1


def test_rounds_without_drafts_tell_nothing() -> None:
    of = policy(0.2, 0.5, 0.15)
    before = of.speeds()
    of.record_round(DraftTree(), ())
    assert (of.speeds() == before).all()
