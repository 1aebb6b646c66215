"""Two reports side by side, with how sure one can be of what differs.

Legend: P prompts, C columns, R resamples.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moaspec.errors import DataError

REPORT = "report.json"
RESAMPLES = 10_000
CONFIDENCE = 0.95
SAME = ("target", "dtype", "device", "threads", "machine", "batch")
"""What must be equal for seconds to be comparable."""

Array = npt.NDArray[np.float64]
Prompt = dict[str, Any]
"""A prompt's part of a method's report."""


@dataclass(frozen=True)
class Interval:
    """A figure, and where it lies with 95% confidence over prompts."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Change:
    """One method in both reports, over the prompts that both have.

    Attributes:
        prompts: how many.
        tau_before, tau_after: over these prompts; None where there was no round.
        tau: after minus before.
        speed: after over before; None where seconds cannot be compared, or a text was not the
            target's own.
    """

    method: str
    prompts: int
    tau_before: float | None
    tau_after: float | None
    tau: Interval | None
    speed: Interval | None


@dataclass(frozen=True)
class Comparison:
    """What changed, by method.

    Attributes:
        differs: settings that differ, so that seconds are not compared.
        lossy: methods that were not lossless in one of the two.
    """

    changes: list[Change]
    differs: dict[str, tuple[Any, Any]]
    lossy: list[str]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def read_report(path: Path) -> dict[str, Any]:
    """A `report.json`, or the one in a directory.

    Raises:
        DataError: it is not there, or not a report.
    """
    path = path / REPORT if path.is_dir() else path
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"Cannot read the report {path}: {error}") from error
    if not isinstance(facts, dict) or "methods" not in facts:
        raise DataError(f"{path} is no report of `moaspec eval`; expected its report.json.")
    return facts


def compare_reports(before: dict[str, Any], after: dict[str, Any]) -> Comparison:
    """Compare every method that both reports have, prompt by prompt.

    Raises:
        DataError: they have no method, or no prompt, in common.
    """
    names = [name for name in before["methods"] if name in after["methods"]]
    if not names:
        raise DataError(
            f"The reports have no method in common: {', '.join(before['methods'])} against "
            f"{', '.join(after['methods'])}."
        )
    differs = {
        key: (before.get(key), after.get(key)) for key in SAME if before.get(key) != after.get(key)
    }
    lossy = [
        name
        for name in names
        if not all(report["methods"][name]["lossless"] for report in (before, after))
    ]
    changes = [
        _change(
            name,
            before["methods"][name],
            after["methods"][name],
            timed=not differs and name not in lossy,
        )
        for name in names
    ]
    return Comparison(changes, differs, lossy)


def _change(name: str, before: dict[str, Any], after: dict[str, Any], *, timed: bool) -> Change:
    old, new = _by_prompt(before), _by_prompt(after)
    keys = [key for key in old if key in new]
    if not keys:
        raise DataError(f"The reports have no prompt of {name} in common.")
    pairs = [(old[key], new[key]) for key in keys]
    counts_P4 = np.array([[*_counts(a), *_counts(b)] for a, b in pairs], dtype=np.float64)
    seconds_P2 = np.array([[_seconds(a), _seconds(b)] for a, b in pairs], dtype=np.float64)
    tau_before, tau_after = (_tau(counts_P4[:, i : i + 2].sum(0)) for i in (0, 2))
    timed = timed and bool(np.isfinite(seconds_P2).all())
    has_tau = tau_before is not None and tau_after is not None
    return Change(
        name,
        len(keys),
        tau_before,
        tau_after,
        interval(counts_P4, _tau_difference) if has_tau else None,
        interval(_log_speeds(pairs, seconds_P2), _geometric_mean) if timed else None,
    )


def interval(rows_PC: Array, figure: Callable[[Array], Array]) -> Interval:
    """A figure of summed rows, with a percentile bootstrap over rows.

    Args:
        rows_PC: one row per prompt; what belongs together is resampled together.
        figure: from sums (..., C) to (...).
    """
    number = len(rows_PC)
    draws_RP = np.random.default_rng(0).multinomial(number, [1 / number] * number, size=RESAMPLES)
    with np.errstate(divide="ignore", invalid="ignore"):
        found_R = figure(draws_RP @ rows_PC)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.nanquantile(found_R, [tail, 1 - tail])
    return Interval(float(figure(rows_PC.sum(0))), float(low), float(high))


def _tau_difference(sums: Array) -> Array:
    """Columns: emitted and rounds before, emitted and rounds after."""
    return sums[..., 2] / sums[..., 3] - sums[..., 0] / sums[..., 1]


def _geometric_mean(sums: Array) -> Array:
    """Columns: logarithms, ones."""
    return np.exp(sums[..., 0] / sums[..., 1])


def _log_speeds(pairs: Sequence[tuple[Prompt, Prompt]], seconds_P2: Array) -> Array:
    """Logarithm of each prompt's speed after over before, and a column of ones."""
    tokens_P2 = np.array([[a["tokens"], b["tokens"]] for a, b in pairs], dtype=np.float64)
    log_P2 = np.log(tokens_P2 / seconds_P2)
    return np.stack((log_P2[:, 1] - log_P2[:, 0], np.ones(len(pairs))), axis=1)


def _by_prompt(method: dict[str, Any]) -> dict[tuple[str, str, int], Prompt]:
    return {(p["suite"], p["question_id"], p["turn"]): p for p in method["prompts"]}


def _counts(prompt: Prompt) -> tuple[int, int]:
    return prompt["emitted"], prompt["rounds"]


def _seconds(prompt: Prompt) -> float:
    return statistics.median(prompt["seconds"]) if prompt["seconds"] else float("nan")


def _tau(sums: Array) -> float | None:
    return float(sums[0] / sums[1]) if sums[1] else None
