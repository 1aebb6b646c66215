"""How much a device drafts on its link."""

from __future__ import annotations

import pytest

from moaspec.drafting.draft_tree import DraftTree
from moaspec.remote.device.link_policy import (
    NUM_OBSERVED,
    STREAM_SLACK_S,
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
    """The server always has tokens to stream for a round trip and `STREAM_SLACK_S`."""
    plain_s, wait_s = 0.15, 0.16
    of = policy(wait_s, step_s, plain_s, ahead=ahead)
    for _ in range(1000):
        assert of.shape(10, 1) is None
        assert of.pause * plain_s >= wait_s + STREAM_SLACK_S
    assert not of.observes  # a step does not fit between two tokens


def test_asks_for_no_more_than_a_server_streams() -> None:
    of = policy(30.0, 0.01, 0.05)
    assert of.shape(10, 1) is None
    assert of.pause == MAX_FURTHER


def test_observed_drafts_decide() -> None:
    """They begin where streamed tokens show that they would pay, and not before."""
    of = policy(0.192, 0.01, 0.15)
    for _ in range(12):
        of.observe(False)
    observed = list[int]()
    for number in range(1, 25):
        assert max(depths(of, 1)) == 0
        observed += [number] if of.observes else []
    assert observed == [*range(2, NUM_OBSERVED + 1), 20, 24]
    asked, found = of.pause, list[int]()
    for _ in range(40):
        of.observe(True)
        found += depths(of, 1)
    first = next(place for place, depth in enumerate(found) if depth)
    assert first > asked  # the tokens that the server already streams come first
    assert min(found[first:]) > 0


def test_a_fast_link_begins_drafts() -> None:
    waits_s = [9.0]
    of = LinkPolicy(
        wait_s=lambda: waits_s[-1], step_s=lambda: 0.003, plain_s=lambda: 0.05, ahead=True
    )
    assert max(depths(of, 100)) == 0
    asked = of.pause
    waits_s.append(0.06)
    found = depths(of, 100)
    assert max(found[:asked]) == 0
    assert min(found[asked:]) > 0


def test_drafts_that_are_rejected_end() -> None:
    of = policy(0.192, 0.01, 0.15)
    found = depths(of, 1)
    while found[-1]:
        of.record_round(DraftTree((1, 2), (-1, 0)), ())
        found += depths(of, 1)
    assert 1 < len(found) < 10
    assert max(depths(of, 100)) == 0


def test_a_step_is_measured_before_it_is_needed() -> None:
    for of in (policy(0.2, None, 0.15), policy(0.2, None, 0.15, ahead=False)):
        assert max(depths(of, 100)) == 0
        assert of.observes
    assert depths(policy(0.2, None, None), 1) != [0]


def test_few_steps_are_not_decided_by() -> None:
    known = [False]
    of = LinkPolicy(
        wait_s=lambda: 0.16,
        step_s=lambda: 0.005,
        plain_s=lambda: 0.15,
        measuring=lambda: not known[-1],
        ahead=True,
    )
    assert max(depths(of, 100)) == 0
    assert of.observes
    asked = of.pause
    known.append(True)
    found = depths(of, 40)
    assert max(found[:asked]) == 0
    assert min(found[asked:]) > 1


def test_rounds_without_drafts_tell_nothing() -> None:
    of = policy(0.2, 0.5, 0.15)
    before = of.speeds()
    of.record_round(DraftTree(), ())
    assert (of.speeds() == before).all()
