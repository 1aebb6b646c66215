"""Times of rounds that the engine hands to `ObservedTimes`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from costs import by_cost, table
from moaspec_core.engine import engine
from moaspec_core.policy.observed_times import ObservedTimes


@pytest.mark.parametrize(("second", "recorded"), [((1.0, 1.0), 1), ((0.0, 0.0), 0)])
def test_a_round_counts_where_the_costs_of_all_rows_are_known(
    second: tuple[float, float], recorded: int
) -> None:
    """Otherwise the time of all rows would be compared with the costs of some."""
    times, rows = ObservedTimes(), list[Any]()
    for round_s in ((1.0, 1.3), second):
        policy = by_cost(table(), 0.5)
        policy.round_s = round_s
        rows.append(SimpleNamespace(policy=policy))
    engine._record(times, rows, started_s=0.0, encode_s=0.0)
    assert len(times._run) == recorded
