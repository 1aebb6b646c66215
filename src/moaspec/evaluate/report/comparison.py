"""Compare two reports, with confidence intervals of the differences.

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
from moaspec.evaluate.file_names import REPORT

RESAMPLES = 10_000
CONFIDENCE = 0.95
MIN_CONVERSATIONS = 10
"""Smallest number of conversations for an interval; a bootstrap over fewer is too narrow."""

SAME_FACTS = ("target", "dtype", "device", "threads", "machine", "batch")
SAME_SETTINGS = ("max_new_tokens", "system", "temperature", "seed")
"""Facts and settings that must be equal to compare speeds."""

REPORT_KEYS = {*SAME_FACTS, "baseline", "settings", "versions", "python", "skipped"}
METHOD_KEYS = {
    "timed",
    "lossless",
    "median_speedup",
    "tokens_per_s",
    "tokens_per_s_by_repeat",
    "tau",
    "passes_per_token",
    "acceptance_by_depth",
    "suites",
    "categories",
    "prompts",
}
"""Required keys of a report."""

Array = npt.NDArray[np.float64]
Prompt = dict[str, Any]
"""The entry of a prompt in a method's report."""


@dataclass(frozen=True)
class Interval:
    """A figure with its 95% confidence interval over conversations.

    Attributes:
        low, high: None for fewer than `MIN_CONVERSATIONS` conversations.
    """

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class MethodChange:
    """The change of one method, over the prompts of both reports.

    Attributes:
        prompts: their number.
        tau_before, tau_after: over these prompts; None without rounds.
        tau: after minus before.
        speed: after over before, geometric mean over turns; None if speeds cannot be compared or a
            text was not the target's own.
    """

    method: str
    prompts: int
    tau_before: float | None
    tau_after: float | None
    tau: Interval | None
    speed: Interval | None


@dataclass(frozen=True)
class Comparison:
    """Changes by method.

    Attributes:
        differs: settings that differ, so that speeds are not compared.
        lossy: methods that are lossy in one of the reports.
    """

    changes: list[MethodChange]
    differs: dict[str, tuple[Any, Any]]
    lossy: list[str]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def read_report(path: Path) -> dict[str, Any]:
    """Read a `report.json`, given its path or directory.

    Raises:
        DataError: the file does not exist or is not a report.
    """
    path = path / REPORT if path.is_dir() else path
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"Cannot read the report {path}: {error}. `moaspec eval --out` writes it at its end."
        ) from error
    methods = facts.get("methods") if isinstance(facts, dict) else None
    whole = isinstance(methods, dict) and all(
        isinstance(method, dict) and method.keys() >= METHOD_KEYS for method in methods.values()
    )
    if not methods or not whole or not facts.keys() >= REPORT_KEYS:
        raise DataError(f"{path} is no whole report of `moaspec eval`; expected its report.json.")
    return facts


def compare_reports(before: dict[str, Any], after: dict[str, Any]) -> Comparison:
    """Compare every method that both reports have, prompt by prompt.

    Raises:
        DataError: the reports have no method or no prompt in common.
    """
    names = [name for name in before["methods"] if name in after["methods"]]
    if not names:
        raise DataError(
            f"The reports have no method in common: {', '.join(before['methods'])} against "
            f"{', '.join(after['methods'])}."
        )
    old, new = (
        {key: report[key] for key in SAME_FACTS} | _settings(report) for report in (before, after)
    )
    differs = {key: (old[key], new[key]) for key in old if old[key] != new[key]}
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


def _settings(report: dict[str, Any]) -> dict[str, Any]:
    return {key: report["settings"].get(key) for key in SAME_SETTINGS}


def _change(
    name: str, before: dict[str, Any], after: dict[str, Any], *, timed: bool
) -> MethodChange:
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
    return MethodChange(
        name,
        len(keys),
        tau_before,
        tau_after,
        interval(_by_conversation(counts_P4, keys), _tau_difference) if has_tau else None,
        interval(_by_conversation(_log_speeds(pairs, seconds_P2), keys), _geometric_mean)
        if timed
        else None,
    )


def _by_conversation(rows_PC: Array, keys: Sequence[tuple[str, str, int]]) -> Array:
    """Sum the rows of each conversation, because its turns depend on one another."""
    names = list(dict.fromkeys(key[:2] for key in keys))
    places = [names.index(key[:2]) for key in keys]
    rows_TC = np.zeros((len(names), rows_PC.shape[1]))
    np.add.at(rows_TC, places, rows_PC)
    return rows_TC


def interval(rows_PC: Array, figure: Callable[[Array], Array]) -> Interval:
    """A figure of summed rows, with a percentile bootstrap over rows.

    Args:
        rows_PC: one row per conversation.
        figure: from sums (..., C) to (...).
    """
    value = float(figure(rows_PC.sum(0)))
    with np.errstate(divide="ignore", invalid="ignore"):
        return bootstrap(value, len(rows_PC), lambda draws_RP: figure(draws_RP @ rows_PC))


def bootstrap(value: float, number: int, resample: Callable[[Array], Array]) -> Interval:
    """The percentile interval of a figure over conversations.

    Args:
        value: the figure.
        number: of conversations.
        resample: from counts (R, `number`) of each conversation in each resample to figures (R,).
    """
    if number < MIN_CONVERSATIONS:
        return Interval(value, None, None)
    draws_RP = np.random.default_rng(0).multinomial(number, [1 / number] * number, size=RESAMPLES)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.nanquantile(resample(draws_RP.astype(np.float64)), [tail, 1 - tail])
    return Interval(value, float(low), float(high))


def _tau_difference(sums: Array) -> Array:
    """Difference of tau; columns: emitted and rounds before, emitted and rounds after."""
    return sums[..., 2] / sums[..., 3] - sums[..., 0] / sums[..., 1]


def _geometric_mean(sums: Array) -> Array:
    """Geometric mean; columns: logarithms, ones."""
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
