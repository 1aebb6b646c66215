"""The verdict of a report with its confidence interval, and the command that repeats it.

Legend: P prompts, T conversations, R resamples.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moaspec.evaluate.report.comparison import Array, Interval, bootstrap, interval

Facts = Mapping[str, Any]

TRANSFORMERS = "hf"
"""Prefix of transformers' own methods, which are references, not candidates."""

FLAGS = (
    "suite",
    "limit",
    "turns",
    "max_new_tokens",
    "repeats",
    "batch",
    "temperature",
    "seed",
    "system",
    "model",
    "drafter",
    "dtype",
    "quantize",
    "device",
    "threads",
)
"""Settings of a report that are options of `moaspec eval`."""


@dataclass(frozen=True)
class ReportVerdict:
    """A verdict in one sentence.

    Attributes:
        kind: "faster", "slower", "unsure", "lossy", or "none" if nothing was compared.
    """

    kind: str
    text: str


def verdict(facts: Facts) -> ReportVerdict:
    """Judge whether the fastest method is faster than the baseline, with the same text."""
    lossy = [name for name, method in facts["methods"].items() if not method["lossless"]]
    if lossy:
        them = "that method" if len(lossy) == 1 else "those methods"
        return ReportVerdict(
            "lossy",
            f"Some texts of {', '.join(lossy)} are not the target's own, so speeds of {them} say "
            "nothing.",
        )
    found = {name: speedup(facts, name) for name in _candidates(facts)}
    known = {name: ratio for name, ratio in found.items() if ratio is not None}
    if not known:
        base = facts["baseline"]
        return ReportVerdict(
            "none", f"No other method was timed, so {base} is compared with nothing."
        )
    best = max(known, key=lambda name: known[name].value)
    return _sentence(best, known[best], facts)


def _candidates(facts: Facts) -> list[str]:
    names = [name for name in facts["methods"] if name != facts["baseline"]]
    return [name for name in names if not name.startswith(TRANSFORMERS)] or names


def _sentence(name: str, found: Interval, facts: Facts) -> ReportVerdict:
    kind = _kind(found)
    begin = {"faster": "Yes: ", "slower": "No: ", "unsure": "Not clearly: "}[kind]
    prompts = len(facts["methods"][name]["prompts"])
    sure = "prompts, too few for an interval"
    if found.low is not None:
        sure = f"prompts, 95% interval {found.low:.2f} to {found.high:.2f}"
    return ReportVerdict(
        kind,
        f"{begin}{name} is {found.value:.2f} times as fast as {facts['baseline']} (median of "
        f"{prompts} {sure}), and every text is the target's own.",
    )


def _kind(found: Interval) -> str:
    low, high = found.low, found.high
    if low is None or high is None:
        low = high = found.value
    if low > 1:
        return "faster"
    return "slower" if high < 1 else "unsure"


def speedup(facts: Facts, name: str) -> Interval | None:
    """A method's median speed-up over the baseline; None if the report has none."""
    method, base = facts["methods"][name], facts["methods"].get(facts["baseline"])
    if method["median_speedup"] is None or base is None:
        return None
    found = prompt_speedups(method, base)
    if any(ratio is None for ratio in found):
        return Interval(method["median_speedup"], None, None)
    ratios = [ratio for ratio in found if ratio is not None]
    return median_interval(ratios, [_conversation(prompt) for prompt in method["prompts"]])


def prompt_speedups(method: Facts, base: Facts) -> list[float | None]:
    """Speed ratio of each prompt to the baseline; None if either is not timed."""
    pairs = zip(method["prompts"], base["prompts"], strict=True)
    return [_ratio(prompt, other) for prompt, other in pairs]


def _ratio(prompt: Facts, other: Facts) -> float | None:
    if not prompt["seconds"] or not other["seconds"] or not other["tokens"]:
        return None
    speeds = [each["tokens"] / float(np.median(each["seconds"])) for each in (prompt, other)]
    return speeds[0] / speeds[1]


def tau(method: Facts) -> Interval | None:
    """Tokens per round with its interval; None without rounds."""
    if method["tau"] is None:
        return None
    conversations: dict[Any, list[float]] = {}
    for prompt in method["prompts"]:
        sums = conversations.setdefault(_conversation(prompt), [0.0, 0.0])
        sums[0] += prompt["emitted"]
        sums[1] += prompt["rounds"]
    return interval(
        np.array(list(conversations.values())), lambda sums: sums[..., 0] / sums[..., 1]
    )


def _conversation(prompt: Facts) -> tuple[str, str]:
    """The key of a prompt's conversation, whose turns depend on one another."""
    return prompt["suite"], prompt["question_id"]


def median_interval(values: Sequence[float], conversations: Sequence[Any]) -> Interval:
    """A median, with a percentile bootstrap over conversations."""
    names = list(dict.fromkeys(conversations))
    order_P = np.argsort(values)
    sorted_P = np.asarray(values, dtype=np.float64)[order_P]
    index_P = np.array([names.index(name) for name in conversations])[order_P]

    def medians(draws_RT: Array) -> Array:
        # The middle of the sorted values, each counted as often as its conversation was drawn.
        counts_RP = draws_RT[:, index_P].cumsum(axis=1)
        half_R1 = counts_RP[:, -1:] / 2
        below_R, above_R = (counts_RP < half_R1).sum(1), (counts_RP <= half_R1).sum(1)
        return (sorted_P[below_R] + sorted_P[above_R]) / 2

    return bootstrap(float(np.median(values)), len(names), medians)


def eval_command(facts: Facts) -> str:
    """The command that repeats the measurement, one option per line."""
    settings, methods = facts["settings"], facts["methods"]
    timed = [name for name, method in methods.items() if method["timed"]]
    untimed = [name for name in methods if name not in timed]
    options = [("methods", ",".join(timed))]
    options += [("tau-only", ",".join(untimed))] if untimed else []
    given = [(name, settings.get(name)) for name in FLAGS]
    options += [(name.replace("_", "-"), str(value)) for name, value in given if value is not None]
    if "generation_config" in settings:  # only if not the model's own
        options += [("generation-config", settings["generation_config"] or "none")]
    checkpoints = settings.get("checkpoints") or {}
    options += [("checkpoint", f"{kind}={path}") for kind, path in checkpoints.items()]
    words = [shlex.join((f"--{name}", value)) for name, value in options]
    return " \\\n    ".join(("moaspec eval", *words))


def prompt_rows(facts: Facts) -> list[dict[str, Any]]:
    """One row per prompt, with speed-up, tau and equality of each method."""
    methods = facts["methods"]
    base = methods.get(facts["baseline"])
    speedups = {
        name: prompt_speedups(method, base)
        if base is not None and method["median_speedup"] is not None
        else [None] * len(method["prompts"])
        for name, method in methods.items()
    }
    first = next(iter(methods.values()))["prompts"]
    return [
        {
            **{key: prompt[key] for key in ("suite", "question_id", "turn", "prompt_tokens")},
            "category": prompt.get("category", ""),
            "tokens": prompt["tokens"],
            "methods": {
                name: _cell(method["prompts"][i], speedups[name][i])
                for name, method in methods.items()
            },
        }
        for i, prompt in enumerate(first)
    ]


def _cell(prompt: Facts, ratio: float | None) -> dict[str, Any]:
    kind = prompt.get("equality", {}).get("kind")
    return {"speedup": ratio, "tau": prompt["tau"], "text": kind}
