"""Reports as tables in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moaspec.cli.loading import num_threads
from moaspec.cli.terminal import console
from moaspec.cli.terminal.table import Table, show_table

if TYPE_CHECKING:
    from moaspec.evaluate.cut_quality import CutQuality
    from moaspec.evaluate.pass_costs import PassCosts
    from moaspec.evaluate.report.comparison import Comparison, Interval
    from moaspec.evaluate.report.report import Report

Facts = Mapping[str, Any]  # a report as JSON, a method in it, or a prompt

SHOWN_FAULTS = 3
SPEEDS = (
    "Total: the tokens of all prompts over their seconds. Median: of the prompts, each by itself."
)
ROUND_PARTS = ("draft", "verify", "encode", "rest")


def show(report: Report) -> None:
    """Print what was measured, and what speed-ups and equality mean."""
    facts = report.as_json()
    show_table(methods_table(facts))
    console.print_wrapped(f"{SPEEDS} {facts['rule']}", "dim")
    for name, method in facts["methods"].items():
        wrong = [one for one in method["prompts"] if one["equality"]["kind"] == "different"]
        for prompt in wrong[:SHOWN_FAULTS]:
            console.print_wrapped(_fault(name, prompt), "red")
    if facts["skipped"]:
        console.print_wrapped(
            f"{len(facts['skipped'])} turns were left out: with their answer they do not fit into "
            "the target's context.",
            "yellow",
        )
    for part in (methods_costs_table(facts), parts_table(facts)):
        if part.rows:
            console.out.print()
            show_table(part)


def methods_table(facts: Facts) -> Table:
    """A row per method: how fast, and whether its texts are right."""
    batch, base, methods = facts["batch"], facts["baseline"], facts["methods"]
    how = f"{batch} prompts at once" if batch > 1 else "one prompt at a time"
    title = (
        f"{facts['target']}, {facts['dtype']}, {num_threads(facts['threads'])}, {facts['choice']}, "
        f"{len(methods[base]['prompts'])} prompts, {how}"
    )
    speed = "throughput, tokens/s" if batch > 1 else "tokens/s"
    speeds = (f"{speed} (total)", *(f"speed-up over {base} ({of})" for of in ("total", "median")))
    headings = ("method", *speeds, "tau", "acceptance by depth", f"same text as {base}")
    rows = [
        (
            name,
            _speed(method),
            *_speedups(facts, method),
            _number(method["tau"]),
            " ".join(f"{share:.0%}" for share in method["acceptance_by_depth"]),
            _equal(method),
        )
        for name, method in methods.items()
    ]
    return Table(headings, rows, title)


def methods_costs_table(facts: Facts) -> Table:
    """Where the time of timed methods goes."""
    parts = (f"{part}, ms/round" for part in ROUND_PARTS)
    more = ("passes/token", "CPU s/token", "peak MB")
    rows = [
        (
            name,
            _number(method["first_token_s"]),
            *(_ms(method["round_s"][part]) if method["round_s"] else "" for part in ROUND_PARTS),
            _number(method["passes_per_token"]),
            f"{method['cpu_s_per_token']:.3f}",
            "" if method["peak_bytes"] is None else f"{method['peak_bytes'] / 1e6:.0f}",
        )
        for name, method in facts["methods"].items()
        if method["timed"]
    ]
    return Table(("method", "first token, s (median)", *parts, *more), rows)


def parts_table(facts: Facts) -> Table:
    """Tau by suite, or by category where there is one suite only."""
    methods = {name: one for name, one in facts["methods"].items() if one["tau"] is not None}
    for title, key in (("suite", "suites"), ("category", "categories")):
        parts = {name: method[key] for name, method in methods.items()}
        names = list(next(iter(parts.values()), ()))
        if len(names) > 1:
            rows = [
                (name, *(_number(part[name]["tau"]) for part in parts.values())) for name in names
            ]
            return Table((f"tau by {title}", *parts), rows)
    return Table((), ())


def _fault(method: str, prompt: Facts) -> str:
    """Where a text is not the target's."""
    found = prompt["equality"]
    gap = "" if found["gap"] is None else f", {found['gap']:.3g} logits off"
    return (
        f"{method}: {prompt['suite']} {prompt['question_id']}, turn {prompt['turn'] + 1}, token "
        f"{found['position']}: {found['reason']}{gap}"
    )


def _speed(method: Facts) -> str:
    """The middle and, with repeats, the range."""
    if method["tokens_per_s"] is None:
        return "not timed"
    spread = method["tokens_per_s_by_repeat"]
    span = f" ({min(spread):.1f} to {max(spread):.1f})" if len(spread) > 1 else ""
    return f"{method['tokens_per_s']:.1f}{span}"


def _speedups(facts: Facts, method: Facts) -> tuple[str, str]:
    """Of all prompts together, and the median of the prompts' own."""
    base = facts["methods"][facts["baseline"]]
    if not method["lossless"]:
        return ("lossy", "lossy")
    if not base["lossless"]:
        return (f"{facts['baseline']} is lossy",) * 2
    if method["median_speedup"] is None:
        return ("", "")
    total = method["tokens_per_s"] / base["tokens_per_s"]
    return (f"{total:.2f}x", f"{method['median_speedup']:.2f}x")


def _equal(method: Facts) -> str:
    kinds = [prompt["equality"]["kind"] for prompt in method["prompts"]]
    text = f"{kinds.count('identical')} of {len(kinds)}"
    if ties := kinds.count("near_tie"):
        text += f", {ties} part at a tie"
    if wrong := kinds.count("different"):
        text += f", {wrong} DIFFERENT"
    return text


def show_costs(found: PassCosts) -> None:
    """Passes by width, rounds by context and batch, and what the machine allows."""
    bound = found.bound
    show_table(widths_table(found))
    console.print_wrapped(
        f"A pass reads {bound.weight_bytes / 1e6:.0f} MB of weights, which takes at least "
        f"{_ms(bound.floor_s)} ms at {bound.bytes_per_s / 1e9:.1f} GB/s; the arithmetic of a token "
        f"takes {_ms(bound.arithmetic_s)} ms at {bound.flops_per_s / 1e9:.0f} GFLOP/s. Passes over "
        f"up to {bound.free_tokens} tokens cost about as much as over one."
    )
    if found.rounds:
        console.out.print()
        show_table(rounds_table(found))


def widths_table(found: PassCosts) -> Table:
    """What passes cost, and the most that drafting can bring."""
    headings = ("tokens in a pass", "ms", "speed-up if all were right")
    rows = [
        (str(one.tokens), _ms(one.seconds), f"{found.bound.ceiling[one.tokens]:.2f}x")
        for one in found.widths
    ]
    return Table(headings, rows)


def rounds_table(found: PassCosts) -> Table:
    """What the parts of a round cost."""
    parts = (f"{part}, ms" for part in ("plain pass", "draft", "verify", "encode"))
    rows = [
        (
            one.method,
            str(one.context),
            str(one.batch),
            *map(_ms, (one.plain_s, one.draft_s, one.verify_s, one.encode_s)),
            f"{one.break_even:.2f}",
        )
        for one in found.rounds
    ]
    return Table(("method", "context", "rows", *parts, "pays from tau"), rows)


def show_cut(cut: CutQuality) -> None:
    """What the target thinks of each continuation, and what was left out."""
    show_table(cut_table(cut))
    if cut.left_out:
        console.print_wrapped(
            f"{cut.left_out} prompts were left out: they do not fit, or their answer ended before "
            "the cut.",
            "yellow",
        )


def cut_table(cut: CutQuality) -> Table:
    """A row per continuation."""
    facts = cut.as_json()["methods"]
    headings = {
        "log_likelihood": "log-probability per token",
        "agreement": "agreement",
        "same": "tokens as the target's own",
        "accuracy": "accuracy",
    }
    if all(one["accuracy"] is None for one in facts.values()):
        del headings["accuracy"]
    rows = [(name, *(_number(one[key]) for key in headings)) for name, one in facts.items()]
    rows = [(*row, str(facts[row[0]]["tokens"]), str(facts[row[0]]["judged"])) for row in rows]
    first, last = f"alone after {cut.after} tokens", ("tokens", "texts")
    return Table((first, *headings.values(), *last), rows)


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
            one.method,
            str(one.prompts),
            f"{_number(one.tau_before)} to {_number(one.tau_after)}",
            _interval(one.tau, "+.2f"),
            _interval(one.speed, ".2f"),
        )
        for one in found.changes
    ]
    headings = ("method", "prompts", "tau", "change of tau (95%)", "speed ratio (95%)")
    return Table(headings, rows)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _interval(interval: Interval | None, form: str) -> str:
    if interval is None:
        return ""
    if interval.low is None or interval.high is None:
        return f"{interval.value:{form}} (too few to say)"
    return f"{interval.value:{form}} ({interval.low:{form}} to {interval.high:{form}})"
