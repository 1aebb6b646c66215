"""Compare two reports, with confidence intervals of the differences.

Legend: P prompts, T conversations, C columns, R resamples.
"""

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moaspec.evaluate.report import REPORT
from moaspec_core.checkpoint.user_files import open_file
from moaspec_core.errors import DataError
from moaspec_core.support.causes import system_reason

RESAMPLES = 10_000
CONFIDENCE = 0.95
MIN_CONVERSATIONS = 10
"""Smallest number of conversations for an interval; a bootstrap over fewer is too narrow."""

SAME_KEYS = ("target", "dtype", "device", "threads", "machine", "batch")
SAME_SETTINGS = ("max_new_tokens", "system", "temperature", "seed")
"""Facts and settings that must be equal to compare speeds."""

REPORT_KEYS = {*SAME_KEYS, "baseline", "settings", "versions", "python", "skipped"}
METHOD_KEYS = {
    *("timed", "lossless", "median_speedup", "tokens_per_s", "tokens_per_s_by_repeat", "tau"),
    *("passes_per_token", "acceptance_by_depth", "suites", "categories", "prompts"),
}
"""Required keys of a report."""

Array = npt.NDArray[np.float64]
JsonObject = Mapping[str, Any]  # a report, the entry of a method in it, or of a prompt


@dataclass(frozen=True)
class Interval:
    """A figure with its 95% confidence interval over conversations."""

    value: float
    # low, high: None for fewer than `MIN_CONVERSATIONS` conversations.
    low: float | None
    high: float | None


@dataclass(frozen=True)
class MethodChange:
    """The change of one method, over the prompts of both reports."""

    method: str
    prompts: int  # their number
    # tau_before, tau_after: over these prompts; None without rounds.
    tau_before: float | None
    tau_after: float | None
    tau: Interval | None  # after minus before
    # After over before, geometric mean over turns; None if speeds cannot be compared or a text was
    # not the target's own.
    speed: Interval | None


@dataclass(frozen=True)
class Comparison:
    """Changes between two reports, by method."""

    changes: list[MethodChange]
    differs: dict[str, tuple[Any, Any]]  # settings that differ, so that speeds are not compared
    lossy: list[str]  # methods that are lossy in one of the reports

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def read_report(path: Path) -> dict[str, Any]:
    """Read a `report.json`, given its path or directory; DataError where it is none."""
    path = path / REPORT if path.is_dir() else path
    try:
        with open_file(path) as file:
            info = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"Cannot read the report {path}: {system_reason(error)}. "
            "`moaspec eval --out` writes it at its end."
        ) from error
    methods = info.get("methods") if isinstance(info, dict) else None
    whole = isinstance(methods, dict) and all(
        isinstance(method, dict) and method.keys() >= METHOD_KEYS for method in methods.values()
    )
    if not methods or not whole or not info.keys() >= REPORT_KEYS:
        raise DataError(f"{path} is no whole report of `moaspec eval`; expected its report.json.")
    return info


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
    old, new = (_settings(report) for report in (before, after))
    differs = {key: (old[key], new[key]) for key in old if old[key] != new[key]}
    pairs = {name: (before["methods"][name], after["methods"][name]) for name in names}
    lossy = [name for name, pair in pairs.items() if not all(one["lossless"] for one in pair)]
    changes = [
        _change(name, *pair, timed=not differs and name not in lossy)
        for name, pair in pairs.items()
    ]
    return Comparison(changes, differs, lossy)


def _settings(report: JsonObject) -> dict[str, Any]:
    settings = {key: report["settings"].get(key) for key in SAME_SETTINGS}
    return {key: report[key] for key in SAME_KEYS} | settings


def _change(name: str, before: JsonObject, after: JsonObject, *, timed: bool) -> MethodChange:
    old, new = (
        {(*conversation(prompt), prompt["turn"]): prompt for prompt in method["prompts"]}
        for method in (before, after)
    )
    pairs = [(old[key], new[key]) for key in old if key in new]
    if not pairs:
        raise DataError(f"The reports have no prompt of {name} in common.")
    conversations = [conversation(prompt) for prompt, _ in pairs]
    counts_P4 = np.array([[*counts(a), *counts(b)] for a, b in pairs])
    tau_before, tau_after = (_tau(counts_P4[:, i : i + 2].sum(0)) for i in (0, 2))
    has_tau = tau_before is not None and tau_after is not None
    ratios = [speed_ratio(b, a) for a, b in pairs]
    logs_P2 = np.array([[np.log(ratio), 1.0] for ratio in ratios if ratio])
    return MethodChange(
        name,
        len(pairs),
        tau_before,
        tau_after,
        interval(counts_P4, conversations, _tau_difference) if has_tau else None,
        interval(logs_P2, conversations, lambda sums: np.exp(ratio(sums)))
        if timed and len(logs_P2) == len(pairs)
        else None,
    )


def conversation(prompt: JsonObject) -> tuple[str, str]:
    """The key of a prompt's conversation, whose turns depend on one another."""
    return prompt["suite"], prompt["question_id"]


def counts(prompt: JsonObject) -> tuple[float, float]:
    """Emitted tokens and rounds, whose ratio is tau."""
    return prompt["emitted"], prompt["rounds"]


def speed_ratio(prompt: JsonObject, other: JsonObject) -> float | None:
    """Speed of one decoding of a prompt over that of another; None if either is not timed."""
    if not (prompt["seconds"] and other["seconds"] and other["tokens"]):
        return None
    a, b = (one["tokens"] / float(np.median(one["seconds"])) for one in (prompt, other))
    return a / b


def interval(
    rows_PC: Array, conversations: Sequence[Hashable], figure: Callable[[Array], Array]
) -> Interval:
    """A figure of summed rows, with a percentile bootstrap over conversations.

    Args:
        rows_PC: one row per prompt.
        conversations: the key of each prompt's conversation.
        figure: from sums (..., C) to (...).
    """
    index_P = numbered(conversations)
    rows_TC = np.zeros((index_P.max() + 1, rows_PC.shape[1]))
    np.add.at(rows_TC, index_P, rows_PC)
    value = float(figure(rows_TC.sum(0)))
    with np.errstate(divide="ignore", invalid="ignore"):
        return bootstrap(value, len(rows_TC), lambda draws_RT: figure(draws_RT @ rows_TC))


def numbered(conversations: Sequence[Hashable]) -> npt.NDArray[np.int64]:
    """The number of each prompt's conversation, in the order of their first turns."""
    numbers = {key: number for number, key in enumerate(dict.fromkeys(conversations))}
    return np.array([numbers[key] for key in conversations])


def bootstrap(value: float, number: int, resample: Callable[[Array], Array]) -> Interval:
    """The percentile interval of a figure over conversations.

    Args:
        number: of conversations.
        resample: from counts (R, `number`) of each conversation in each resample to figures (R,).
    """
    if number < MIN_CONVERSATIONS:
        return Interval(value, None, None)
    draws_RT = np.random.default_rng(0).multinomial(number, [1 / number] * number, size=RESAMPLES)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.nanquantile(resample(draws_RT.astype(np.float64)), [tail, 1 - tail])
    return Interval(value, float(low), float(high))


def ratio(sums: Array) -> Array:
    """The first of two columns over the second."""
    return sums[..., 0] / sums[..., 1]


def _tau_difference(sums: Array) -> Array:
    """Difference of tau; columns: emitted and rounds before, emitted and rounds after."""
    return ratio(sums[..., 2:]) - ratio(sums[..., :2])


def _tau(sums: Array) -> float | None:
    return float(ratio(sums)) if sums[1] else None
