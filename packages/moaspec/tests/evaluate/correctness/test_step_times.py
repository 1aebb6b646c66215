"""The remaining time of steps of several kinds."""

from __future__ import annotations

import pytest

from moaspec.evaluate.correctness.step_times import StepTimes


def test_the_rest_is_known_when_a_step_of_each_remaining_kind_was_timed() -> None:
    now_s = 0.0
    times = StepTimes({"long": 3, "short": 2, "none": 0}, clock=lambda: now_s)

    def take(kind: str, seconds: float) -> None:
        nonlocal now_s
        with times.step(kind):
            now_s += seconds

    assert times.left_s is None
    take("long", 100.0)
    assert times.left_s is None
    take("short", 1.0)
    assert times.left_s == pytest.approx(2 * 100 + 1)
    take("short", 3.0)
    take("short", 3.0)  # more than were planned
    assert times.left_s == pytest.approx(2 * 100)
    take("long", 50.0)
    assert times.left_s == pytest.approx(75)
    take("long", 75.0)
    assert times.left_s == 0
