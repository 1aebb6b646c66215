"""What a training step tells the display, the log and trackers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from moaspec.train.students.losses import LossSums


@dataclass(frozen=True)
class StepMetrics:
    """What one optimiser step tells the display and the log.

    Attributes:
        step: steps done.
        tokens: tokens with loss so far.
        tokens_per_s: tokens with loss a second, in this step.
        loss, feature, kl: means over the step's tokens (and over exits).
        accuracy: share of first choices that are the target's, in the first exit.
        held_out_accuracy: by draft step, in the first exit, where measured.
        held_out_tau: simulated tau of each N, where measured; see `train.students.held_out`.
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
    """Of a step that took `elapsed` seconds; `parts` are its sums."""
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
    """What trackers plot."""
    row = dataclasses.asdict(progress)
    taus = row.pop("held_out_tau") or {}
    steps = row.pop("held_out_accuracy") or []
    row |= {f"held_out_tau/N{n}": tau for n, tau in taus.items() if tau is not None}
    row |= {f"held_out_accuracy/{i}": value for i, value in enumerate(steps, start=1)}
    return row
