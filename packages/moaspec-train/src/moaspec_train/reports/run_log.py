"""The log of a training run: one JSON object of metrics per step. A resumed run appends to it."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from moaspec.model.checkpoint.weight_files import replace_file
from moaspec_train.students.losses import LossSums


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one optimiser step."""

    step: int
    tokens: int  # tokens with loss so far
    tokens_per_s: float  # tokens with loss per second, in this step
    # loss, feature, kl: means over the step's tokens (and over exits).
    loss: float
    feature: float
    kl: float
    accuracy: float  # share of the first exit's most likely drafts that are the target's choice
    gradient_norm: float = 0.0  # before it was clipped
    learning_rate: float = 0.0
    padding: float = 0.0  # share of pads among the tokens of the step's passes
    memory_gb: float = 0.0  # the most so far, of the first process: on its GPU, or in all
    skipped: int = 0  # batches so far whose loss or gradients were not finite
    # Of the first exit by draft step; None if not measured in this step.
    held_out_accuracy: list[float] | None = None
    # Simulated tau by N, see `train.students.held_out`; None if not measured.
    held_out_tau: dict[str, float | None] | None = None


OnStep = Callable[[StepMetrics], None]


def step_metrics(
    step: int, tokens: int, elapsed: float, parts: LossSums, facts: Mapping[str, float]
) -> StepMetrics:
    """Compute metrics from the sums of a step that took `elapsed` seconds.

    Args:
        facts: the fields that `Trainer.train_step` knows.
    """
    count = parts.count
    return StepMetrics(
        step=step,
        tokens=tokens,
        tokens_per_s=round(count / elapsed, 1),
        loss=round(parts.total / count, 5),
        feature=round(parts.feature / count, 5),
        kl=round(parts.kl / count, 5),
        accuracy=round(parts.hits / count, 4),
        gradient_norm=float(f"{facts['gradient_norm']:.4g}"),
        learning_rate=float(f"{facts['learning_rate']:.6g}"),
        padding=round(facts["padding"], 4),
        memory_gb=round(facts["memory_gb"], 3),
        skipped=int(facts["skipped"]),
    )


def tracker_values(progress: StepMetrics) -> dict[str, float]:
    """Flatten metrics to one number per name, as trackers plot them."""
    row = dataclasses.asdict(progress)
    taus = row.pop("held_out_tau") or {}
    steps = row.pop("held_out_accuracy") or []
    row |= {f"held_out_tau/N{n}": tau for n, tau in taus.items() if tau is not None}
    row |= {f"held_out_accuracy/{i}": value for i, value in enumerate(steps, start=1)}
    return row


@dataclass(frozen=True)
class BestStep:
    """The best step of a run: its number, and its `held_out_score`."""

    step: int
    score: float


def held_out_score(progress: StepMetrics) -> float:
    """Simulated tau of the first exit; mean held-out accuracy where it cannot be measured."""
    tau = next(iter((progress.held_out_tau or {}).values()), None)
    return fmean(progress.held_out_accuracy or (0.0,)) if tau is None else tau


class RunLog:
    """Reads and appends the lines of `log.jsonl`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def cut(self, step: int) -> None:
        """Drop rows after the step at which the run resumes."""
        if self._path.exists():
            rows = [json.dumps(row) + "\n" for row in self.rows() if row["step"] <= step]
            replace_file(self._path, lambda path: path.write_text("".join(rows), encoding="utf-8"))

    def rows(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        rows = []
        for line in self._path.read_bytes().splitlines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue  # the last line, if a run was killed while writing it
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
        return rows

    def write(self, row: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
