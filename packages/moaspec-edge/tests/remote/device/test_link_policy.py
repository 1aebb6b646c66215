"""How much a device drafts on its link."""

from __future__ import annotations

import pytest

from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.support.limits import MAX_STREAMED
from moaspec_edge.device.link_policy import (
    FIRST_LOSS,
    LOSS_PER_TOKEN,
    MAX_BUDGET,
    NUM_OBSERVED,
    STREAM_SLACK_S,
    LinkPolicy,
)
from moaspec_edge.protocol.wire import chain


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


def test_the_gain_of_drafts_is_known_once_measured() -> None:
    """Without drafts it is 1: a server's streaming does not wait for the link."""
    slow_target, fast_target = policy(0.16, 0.005, 0.15), policy(0.04, 0.005, 0.008)
    assert slow_target.gain is not None
    assert fast_target.gain is not None
    assert slow_target.gain > 1 > fast_target.gain
    assert policy(0.16, None, 0.15).gain is None
    assert policy(0.16, 0.005, None).gain is None


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
    assert of.pause == MAX_STREAMED


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


@pytest.mark.parametrize("num_right", [0, 500])
def test_drafts_that_the_server_drops_end(num_right: int) -> None:
    """They are neither right nor wrong, but cost time, whatever others have gained before."""
    wait_s, plain_s, rounds = 0.2, 0.15, 1000
    of = policy(wait_s, 0.005, plain_s)
    for _ in range(40):
        of.observe(True)
    assert min(depths(of, 1)) > 0
    for (depth,) in (depths(of, 1) for _ in range(num_right)):
        of.record_round(chain(range(depth)), range(depth))
    before, lost = of.speeds(), 0.0
    for (depth,) in (depths(of, 1) for _ in range(rounds)):
        if depth:
            of.record_round(DraftTree(), ())
            lost += wait_s / plain_s - 1
    assert 0 < lost < (MAX_BUDGET if num_right else FIRST_LOSS) + LOSS_PER_TOKEN * rounds + 1
    assert (of.speeds() == before).all()


def test_some_rounds_do_not_count() -> None:
    of = LinkPolicy(
        wait_s=lambda: 0.16,
        step_s=lambda: 0.005,
        plain_s=lambda: 0.15,
        counts=lambda: False,
        ahead=True,
    )
    before = of.speeds()
    for (depth,) in (depths(of, 1) for _ in range(100)):
        assert depth
        of.record_round(chain(range(depth)), ())
    assert (of.speeds() == before).all()


@pytest.mark.parametrize(("wait_s", "observes"), [(0.5, False), (0.2, True)])
def test_nothing_is_observed_where_the_best_drafts_would_not_pay(
    wait_s: float, observes: bool
) -> None:
    """25 tokens take a round trip, or 0.25 s without drafts."""
    of, found = policy(wait_s, 0.003, 0.01), list[bool]()
    for _ in range(100):
        assert depths(of, 1) == [0]
        found.append(of.observes)
    assert any(found) is observes


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
