"""Times by which a device decides how much to draft."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.engine.position_rules import PositionRules
from moaspec_edge.device.draft_ahead import AheadDrafter
from moaspec_edge.device.events import LinkStats, RoundTrip
from moaspec_edge.protocol.wire import chain


def waited(stats: LinkStats, seconds: float, drafted: int, dropped: int = 0) -> None:
    stats.add_round(RoundTrip(0.0, seconds, 0.1, drafted, 0, 0, dropped))


def test_heartbeats_show_that_a_link_has_become_fast() -> None:
    stats = LinkStats()
    assert stats.wait_s is None
    stats.rtt_s = 1.0
    assert stats.wait_s == 1.0
    for seconds in (1.0, 30.0, 1.1, 1.05, 1.2):
        waited(stats, seconds, 3)
        waited(stats, 0.01, 0)  # streamed
    assert stats.wait_s == pytest.approx(1.1)
    stats.rtt_s = 5.0
    assert stats.wait_s == pytest.approx(1.1)
    stats.rtt_s = 0.02
    assert stats.wait_s == pytest.approx(0.12)  # 0.1 more than the round trip, as before


def test_a_wait_counts_although_a_busy_server_dropped_its_drafts() -> None:
    stats = LinkStats()
    stats.rtt_s = 0.02
    waited(stats, 0.3, 0, dropped=1)
    waited(stats, 0.01, 0)  # streamed
    assert stats.wait_s == pytest.approx(0.3)


def test_a_cut_is_no_wait() -> None:
    stats = LinkStats()
    stats.rtt_s = 0.02
    stats.add_round(RoundTrip(0.0, 8.0, 0.1, 12, 12, 0, repeated=True))
    assert stats.wait_s == pytest.approx(0.12)


def test_a_slow_step_among_others_is_ignored() -> None:
    seconds = iter([9.0, 0.3, 0.01, 0.02, 0.01, *[0.05] * 9])
    clock_s = 0.0

    def propose(_rows: Any, _shape: Tree) -> list[DraftTree]:
        nonlocal clock_s
        clock_s += next(seconds)
        return [chain([1])]

    inner: Any = SimpleNamespace(propose=propose, rollback=lambda *_: None)
    ahead = AheadDrafter(inner, needs_memory=False, clock=lambda: clock_s)
    ahead.begin(end=100, stops=frozenset(), rules=PositionRules(max_positions=100))
    ahead.follow([1] * 20)
    assert ahead.extend()  # reads the prompt
    assert ahead.step_s is None
    found = list[float | None]()
    for _ in range(4):
        assert ahead.is_measuring
        assert ahead.extend()
        found.append(ahead.step_s)
    assert not ahead.is_measuring
    assert found[0] == pytest.approx(0.3)
    assert found[3] == pytest.approx(0.02)
    while ahead.step_s != pytest.approx(0.05):  # the device has become slower
        assert ahead.extend()
