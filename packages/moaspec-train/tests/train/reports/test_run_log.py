"""The best step of a run."""

from __future__ import annotations

import pytest

from moaspec_train.reports.run_log import StepMetrics, held_out_score


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
