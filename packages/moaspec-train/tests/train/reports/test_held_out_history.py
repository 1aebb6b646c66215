"""The best step of a run, and early warning of overfitting."""

from __future__ import annotations

from typing import Any

import pytest

from moaspec_train.reports.held_out_history import held_out_score, overfitting
from moaspec_train.reports.run_log import StepMetrics


def rows(*points: tuple[float, float]) -> list[dict[str, Any]]:
    """Of a log with (training accuracy, held-out accuracy) of every second step."""
    found: list[dict[str, Any]] = []
    for trained, held_out in points:
        found.append({"accuracy": trained - 0.01, "held_out_accuracy": None})
        found.append({"accuracy": trained + 0.01, "held_out_accuracy": [held_out, held_out]})
    return found


@pytest.mark.parametrize(
    ("points", "warns"),
    [
        ([], False),
        ([(0.2, 0.2)], False),
        ([(0.2, 0.2), (0.3, 0.3), (0.4, 0.4)], False),
        ([(0.2, 0.2), (0.4, 0.3), (0.6, 0.35)], False),  # a wider gap, but still rising
        ([(0.2, 0.2), (0.3, 0.3), (0.4, 0.3)], True),
        ([(0.2, 0.2), (0.3, 0.3), (0.4, 0.29)], True),
        ([(0.4, 0.2), (0.42, 0.2), (0.43, 0.2)], False),  # always apart, hardly more
        ([(0.15, 0.31), (0.31, 0.31)], False),  # the mean in training lagged behind
        ([(0.15, 0.31), (0.37, 0.31)], True),
        ([(0.2, 0.2), (0.4, 0.3), (0.4, 0.3), (0.44, 0.3)], False),  # given at 10 points
        ([(0.2, 0.2), (0.4, 0.3), (0.4, 0.3), (0.46, 0.3)], True),
    ],
)
def test_overfitting(points: list[tuple[float, float]], warns: bool) -> None:
    assert (overfitting(rows(*points)) is not None) == warns


def test_what_the_warning_says() -> None:
    text = overfitting(rows((0.2, 0.2), (0.3, 0.3), (0.45, 0.3)))
    assert text is not None
    assert "45% in training and 30% held out" in text
    assert "from 0 to 15 points" in text


def test_the_score_is_tau_where_there_is_one() -> None:
    def measured(tau: float | None) -> StepMetrics:
        return StepMetrics(
            step=1,
            tokens=1,
            tokens_per_s=1.0,
            loss=1.0,
            feature=1.0,
            kl=1.0,
            accuracy=0.5,
            held_out_accuracy=[0.2, 0.4],
            held_out_tau={"0": tau, "3": 9.0},
        )

    assert held_out_score(measured(1.7)) == 1.7
    assert held_out_score(measured(None)) == pytest.approx(0.3)
