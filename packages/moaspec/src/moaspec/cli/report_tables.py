"""Reports as tables in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moaspec.cli.loading import num_threads
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.table import Table, show_table

if TYPE_CHECKING:
    from moaspec.evaluate.report.comparison import Comparison, Interval
    from moaspec.evaluate.report.report import Report

JsonObject = Mapping[str, Any]  # a report as JSON, a method in it, or a prompt

SHOWN_FAULTS = 3
SPEEDS = (
    "Total: the tokens of all prompts over their seconds. Median: of the prompts, each by itself."
)
ROUND_PARTS = ("draft", "verify", "encode", "rest")


def show(report: Report) -> None:
    """Print the tables of a report, and the meaning of speed-ups and equality."""
    info = report.as_json()
    show_table(methods_table(info))
    console.print_wrapped(f"{SPEEDS} {info['rule']}", "dim")
    for name, method in info["methods"].items():
        wrong = [one for one in method["prompts"] if one["equality"]["kind"] == "different"]
        for prompt in wrong[:SHOWN_FAULTS]:
            console.print_wrapped(_fault(name, prompt), "red")
    if info["skipped"]:
        console.print_wrapped(
            f"{len(info['skipped'])} turns were left out: with their answer they do not fit into "
            "the target's context.",
            "yellow",
        )
    for part in (methods_costs_table(info), parts_table(info)):
        if part.rows:
            console.out.print()
            show_table(part)


def methods_table(info: JsonObject) -> Table:
    """A row per method: its speed, and whether its texts are right."""
    batch, base, methods = info["batch"], info["baseline"], info["methods"]
    how = f"{batch} prompts at once" if batch > 1 else "one prompt at a time"
    title = (
        f"{info['target']}, {info['dtype']}, {num_threads(info['threads'])}, {info['choice']}, "
        f"{len(methods[base]['prompts'])} prompts, {how}"
    )
    speed = "throughput, tokens/s" if batch > 1 else "tokens/s"
    speeds = (f"{speed} (total)", *(f"speed-up over {base} ({of})" for of in ("total", "median")))
    headings = ("method", *speeds, "tau", "acceptance by depth", f"same text as {base}")
    rows = [
        (
            name,
            _speed(method),
            *_speedups(info, method),
            number(method["tau"]),
            " ".join(f"{share:.0%}" for share in method["acceptance_by_depth"]),
            _equal(method),
        )
        for name, method in methods.items()
    ]
    return Table(headings, rows, title)


def methods_costs_table(info: JsonObject) -> Table:
    """The times of a round's parts, of timed methods."""
    parts = (f"{part}, ms/round" for part in ROUND_PARTS)
    more = ("passes/token", "CPU s/token", "peak MB")
    rows = [
        (
            name,
            number(method["first_token_s"]),
            *(in_ms(method["round_s"][part]) if method["round_s"] else "" for part in ROUND_PARTS),
            number(method["passes_per_token"]),
            f"{method['cpu_s_per_token']:.3f}",
            "" if method["peak_bytes"] is None else f"{method['peak_bytes'] / 1e6:.0f}",
        )
        for name, method in info["methods"].items()
        if method["timed"]
    ]
    return Table(("method", "first token, s (median)", *parts, *more), rows)


def parts_table(info: JsonObject) -> Table:
    """Tau by suite, or by category for a single suite."""
    methods = {name: one for name, one in info["methods"].items() if one["tau"] is not None}
    for title, key in (("suite", "suites"), ("category", "categories")):
        parts = {name: method[key] for name, method in methods.items()}
        names = list(next(iter(parts.values()), ()))
        if len(names) > 1:
            rows = [
                (name, *(number(part[name]["tau"]) for part in parts.values())) for name in names
            ]
            return Table((f"tau by {title}", *parts), rows)
    return Table((), ())


def _fault(method: str, prompt: JsonObject) -> str:
    """Where a text is not the target's."""
    found = prompt["equality"]
    gap = "" if found["gap"] is None else f", {found['gap']:.3g} logits off"
    return (
        f"{method}: {prompt['suite']} {prompt['question_id']}, turn {prompt['turn'] + 1}, token "
        f"{found['position']}: {found['reason']}{gap}"
    )


def _speed(method: JsonObject) -> str:
    """The middle and, with repeats, the range."""
    if method["tokens_per_s"] is None:
        return "not timed"
    spread = method["tokens_per_s_by_repeat"]
    span = f" ({min(spread):.1f} to {max(spread):.1f})" if len(spread) > 1 else ""
    return f"{method['tokens_per_s']:.1f}{span}"


def _speedups(info: JsonObject, method: JsonObject) -> tuple[str, str]:
    """Of all prompts together, and the median of the prompts' own."""
    base = info["methods"][info["baseline"]]
    if not method["lossless"]:
        return ("lossy", "lossy")
    if not base["lossless"]:
        return (f"{info['baseline']} is lossy",) * 2
    if method["median_speedup"] is None:
        return ("", "")
    total = method["tokens_per_s"] / base["tokens_per_s"]
    return (f"{total:.2f}x", f"{method['median_speedup']:.2f}x")


def _equal(method: JsonObject) -> str:
    kinds = [prompt["equality"]["kind"] for prompt in method["prompts"]]
    text = f"{kinds.count('identical')} of {len(kinds)}"
    if ties := kinds.count("near_tie"):
        text += f", {ties} part at a tie"
    if wrong := kinds.count("different"):
        text += f", {wrong} DIFFERENT"
    return text


def show_comparison(found: Comparison) -> None:
    """Changes with their intervals, and why a speed is missing."""
    show_table(comparison_table(found))
    for key, (old, new) in found.differs.items():
        console.print_wrapped(f"Speeds are not compared: {key} was {old} and is {new}.")
    for name in found.lossy:
        console.print_wrapped(f"{name} is lossy: its speed is not shown.")


def comparison_table(found: Comparison) -> Table:
    """A row per method."""
    rows = [
        (
            change.method,
            str(change.prompts),
            f"{number(change.tau_before)} to {number(change.tau_after)}",
            _interval(change.tau, "+.2f"),
            _interval(change.speed, ".2f"),
        )
        for change in found.changes
    ]
    headings = ("method", "prompts", "tau", "change of tau (95%)", "speed ratio (95%)")
    return Table(headings, rows)


def in_ms(seconds: float) -> str:
    """Seconds as a cell of milliseconds."""
    return f"{seconds * 1000:.1f}"


def number(value: float | None) -> str:
    """A figure as a cell; an empty one where there is none."""
    return "" if value is None else f"{value:.2f}"


def _interval(interval: Interval | None, form: str) -> str:
    if interval is None:
        return ""
    if interval.low is None or interval.high is None:
        return f"{interval.value:{form}} (too few to say)"
    return f"{interval.value:{form}} ({interval.low:{form}} to {interval.high:{form}})"
