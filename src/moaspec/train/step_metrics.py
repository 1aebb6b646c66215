"""Metrics of one training step, for the display, the log and trackers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from moaspec.train.students.losses import LossSums


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one optimiser step.

    Attributes:
        step: steps done.
        tokens: tokens with loss so far.
        tokens_per_s: tokens with loss per second, in this step.
        loss, feature, kl: means over the step's tokens (and over exits).
        accuracy: share of the first exit's most likely drafts that are the target's choice.
        held_out_accuracy: of the first exit by draft step; None if not measured in this step.
        held_out_tau: simulated tau by N, see `train.students.held_out`; None if not measured.
    """

    step: int
    tokens: int
    tokens_per_s: float
    loss: float
    feature: float
    kl: float
    accuracy: float
    held_out_accuracy: list[float] | None = None
    held_out_tau: dict[str, float | None] | None = None


OnStep = Callable[[StepMetrics], None]


def step_metrics(step: int, tokens: int, elapsed: float, parts: LossSums) -> StepMetrics:
    """Compute metrics from the sums of a step that took `elapsed` seconds."""
    count = parts.count
    return StepMetrics(
        step=step,
        tokens=tokens,
        tokens_per_s=round(count / elapsed, 1),
        loss=round(parts.total / count, 5),
        feature=round(parts.feature / count, 5),
        kl=round(parts.kl / count, 5),
        accuracy=round(parts.hits / count, 4),
    )


def tracker_values(progress: StepMetrics) -> dict[str, float]:
    """Flatten metrics to one number per name, as trackers plot them."""
    row = dataclasses.asdict(progress)
    taus = row.pop("held_out_tau") or {}
    steps = row.pop("held_out_accuracy") or []
    row |= {f"held_out_tau/N{n}": tau for n, tau in taus.items() if tau is not None}
    row |= {f"held_out_accuracy/{i}": value for i, value in enumerate(steps, start=1)}
    return row
