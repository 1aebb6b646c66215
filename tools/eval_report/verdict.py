"""The verdict of a report with its confidence interval, and the command that repeats it.

Legend: P prompts, T conversations, C columns, R resamples.
"""

import shlex
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from moaspec.evaluate.report.comparison import (
    Array,
    Interval,
    JsonObject,
    bootstrap,
    conversation,
    counts,
    interval,
    numbered,
    ratio,
    speed_ratio,
)

TRANSFORMERS = "hf"  # prefix of transformers' own methods, which are references, not candidates

FLAGS = (
    *("suite", "limit", "max_new_tokens", "repeats", "batch", "temperature", "seed"),
    *("model", "drafter", "dtype", "quantize", "adapter", "device", "threads"),
)
"""Settings of a report that are options of `moaspec eval`."""


@dataclass(frozen=True)
class ReportVerdict:
    """A verdict in one sentence."""

    kind: str  # "faster", "slower", "unsure", "lossy", or "none" if nothing was compared
    text: str


def verdict(info: JsonObject) -> ReportVerdict:
    """Judge whether the fastest method is faster than the baseline, with the same text."""
    lossy = [name for name, method in info["methods"].items() if not method["lossless"]]
    if lossy:
        them = "that method" if len(lossy) == 1 else "those methods"
        return ReportVerdict(
            "lossy",
            f"Some texts of {', '.join(lossy)} are not the target's own, so speeds of {them} say "
            "nothing.",
        )
    found = {name: speedup(info, name) for name in _candidates(info)}
    known = {name: ratio for name, ratio in found.items() if ratio is not None}
    if not known:
        base = info["baseline"]
        return ReportVerdict(
            "none", f"No other method was timed, so {base} is compared with nothing."
        )
    best = max(known, key=lambda name: known[name].value)
    return _sentence(best, known[best], info)


def _candidates(info: JsonObject) -> list[str]:
    names = [name for name in info["methods"] if name != info["baseline"]]
    return [name for name in names if not name.startswith(TRANSFORMERS)] or names


def _sentence(name: str, found: Interval, info: JsonObject) -> ReportVerdict:
    low, high = (found.value if end is None else end for end in (found.low, found.high))
    kind, begin = "unsure", "Not clearly: "
    if low > 1:
        kind, begin = "faster", "Yes: "
    elif high < 1:
        kind, begin = "slower", "No: "
    prompts = len(info["methods"][name]["prompts"])
    sure = "prompts, too few for an interval"
    if found.low is not None:
        sure = f"prompts, 95% interval {found.low:.2f} to {found.high:.2f}"
    return ReportVerdict(
        kind,
        f"{begin}{name} is {found.value:.2f} times as fast as {info['baseline']} (median of "
        f"{prompts} {sure}), and every text is the target's own.",
    )


def speedup(info: JsonObject, name: str) -> Interval | None:
    """A method's median speed-up over the baseline; None if the report has none."""
    method, found = info["methods"][name], prompt_speedups(info, name)
    if method["median_speedup"] is None or info["baseline"] not in info["methods"]:
        return None
    ratios = [ratio for ratio in found if ratio is not None]
    if len(ratios) < len(found):
        return Interval(method["median_speedup"], None, None)
    return median_interval(ratios, [conversation(prompt) for prompt in method["prompts"]])


def prompt_speedups(info: JsonObject, name: str) -> list[float | None]:
    """A method's speed-up over the baseline on each prompt; None if the report has none."""
    method, base = info["methods"][name], info["methods"].get(info["baseline"])
    if method["median_speedup"] is None or base is None:
        return [None] * len(method["prompts"])
    pairs = zip(method["prompts"], base["prompts"], strict=True)
    return [speed_ratio(prompt, other) for prompt, other in pairs]


def eval_command(info: JsonObject) -> str:
    """The command that repeats the measurement, one option per line."""
    settings, methods = info["settings"], info["methods"]
    timed = [name for name, method in methods.items() if method["timed"]]
    untimed = [name for name in methods if name not in timed]
    options = [("methods", ",".join(timed))]
    options += [("tau-only", ",".join(untimed))] if untimed else []
    given = [(name, settings.get(name)) for name in FLAGS]
    options += [(name.replace("_", "-"), str(value)) for name, value in given if value is not None]
    if settings.get("generation_config", "auto") is None:
        options.append(("generation-config", "none"))
    checkpoints = settings.get("checkpoints") or {}
    options += [("checkpoint", f"{kind}={path}") for kind, path in checkpoints.items()]
    words = [shlex.join((f"--{name}", value)) for name, value in options]
    return " \\\n    ".join(("moaspec eval", *words))


def tau_interval(method: JsonObject) -> Interval | None:
    """Tokens per round with its interval; None without rounds."""
    if method["tau"] is None:
        return None
    counts_P2 = np.array([counts(prompt) for prompt in method["prompts"]])
    return interval(counts_P2, [conversation(prompt) for prompt in method["prompts"]], ratio)


def median_interval(values: Sequence[float], conversations: Sequence[Hashable]) -> Interval:
    """A median, with a percentile bootstrap over conversations."""
    order_P = np.argsort(values)
    sorted_P = np.asarray(values, dtype=np.float64)[order_P]
    index_P = numbered(conversations)[order_P]

    def medians(draws_RT: Array) -> Array:
        # The middle of the sorted values, each counted as often as its conversation was drawn.
        counts_RP = draws_RT[:, index_P].cumsum(axis=1)
        half_R1 = counts_RP[:, -1:] / 2
        below_R, above_R = (counts_RP < half_R1).sum(1), (counts_RP <= half_R1).sum(1)
        return (sorted_P[below_R] + sorted_P[above_R]) / 2

    return bootstrap(float(np.median(values)), int(index_P.max()) + 1, medians)
