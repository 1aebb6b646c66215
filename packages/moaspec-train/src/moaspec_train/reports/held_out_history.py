"""The best step of a run, and warnings of overfitting, from held-out measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from moaspec_train.reports.run_log import StepMetrics

MAX_WIDENING = 0.05
"""Least increase of the gap between training and held-out accuracy for a warning."""
MIN_RISE = 0.005
"""A held-out accuracy that rises less than this from one measurement to the next stands still."""


@dataclass(frozen=True)
class BestStep:
    """The best step of a run: its number, and its `held_out_score`."""

    step: int
    score: float


def held_out_score(progress: StepMetrics) -> float:
    """Simulated tau of the first exit; mean held-out accuracy where it cannot be measured."""
    tau = next(iter((progress.held_out_tau or {}).values()), None)
    return fmean(progress.held_out_accuracy or (0.0,)) if tau is None else tau


def overfitting(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """A warning if the gap between training and held-out accuracy widens, or None.

    It comes when the gap has grown by `MAX_WIDENING` since its smallest value or the last warning,
    while held-out accuracy stands still. Training accuracy is the mean since the last measurement;
    early in a run it is too low, so a negative gap counts as 0.

    Args:
        rows: of the whole log; the last one has a held-out measurement.
    """
    points: list[tuple[float, float]] = []
    since: list[float] = []
    for row in rows:
        if row.get("step") == 0:  # nothing is trained yet
            continue
        since.append(float(row["accuracy"]))
        if row.get("held_out_accuracy"):
            points.append((fmean(since), fmean(row["held_out_accuracy"])))
            since = []
    smallest, given_at, warning = 1.0, 0.0, None
    for number, (trained, held_out) in enumerate(points):
        gap, warning = max(0.0, trained - held_out), None
        rises = not number or held_out >= points[number - 1][1] + MIN_RISE
        if not rises and gap >= max(smallest, given_at) + MAX_WIDENING:
            given_at = gap
            warning = (
                f"Overfitting: accuracy is {trained:.0%} in training and {held_out:.0%} held out, "
                f"and the gap grew from {100 * smallest:.0f} to {100 * gap:.0f} points while "
                "held-out accuracy stands still. More answers of the target help, more epochs do "
                "not."
            )
        smallest = min(smallest, gap)
    return warning
