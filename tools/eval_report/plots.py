"""Plots of a report as inline SVG, drawn without a display and without global state."""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any

from moaspec_core.support.extras import require

WIDTH = 5.0  # width of a plot in inches; narrow, so that its text is legible on a phone

TEXT = {
    "font.size": 9,
    "svg.fonttype": "none",
    "text.parse_math": False,  # names may contain dollar signs
    "axes.spines.top": False,
    "axes.spines.right": False,
}

NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
"""Leaves out metadata, so that equal figures give equal bytes."""

PLAIN = "plain"
Axes = Any
JsonObject = Mapping[str, Any]

Plot = tuple[Callable[[Axes], None], float] | None
"""The function that draws, and the height in inches; None without data."""


def draw_plots(
    info: JsonObject, costs: JsonObject | None = None, cut: JsonObject | None = None
) -> dict[str, str]:
    """Draw all plots that have data, by title.

    Returns:
        SVG elements, which scale with their container.

    Raises:
        InputError: matplotlib is not installed.
    """
    methods: JsonObject = info.get("methods", {})
    base = info.get("baseline", "plain")
    costs = costs or {"widths": (), "rounds": ()}
    # Each method has the same colour in all plots.
    names = dict.fromkeys([PLAIN, *methods, *(cost["method"] for cost in costs["rounds"])])
    colors = {name: f"C{i}" for i, name in enumerate(names)}
    plots = {
        f"Speed-up over {base}": _by_suite(methods, "median_speedup", colors),
        "Tokens per round (tau)": _by_suite(methods, "tau", colors),
        "Acceptance by depth": _acceptance(methods, colors),
        "Time in a round": _round_parts(methods),
        "A pass over several tokens": _widths(costs),
        "Round against context": _rounds(costs["rounds"], "context", "tokens of context", colors),
        "Round against batch": _rounds(costs["rounds"], "batch", "rows", colors),
        "Alone after a cut: likelihood": _cut(cut, "log_likelihood", "log-probability"),
        "Alone after a cut: agreement": _cut(cut, "agreement", "share of tokens"),
        "Alone after a cut: right answers": _cut(cut, "accuracy", "share of answers"),
    }
    return {title: _svg(title, *plot) for title, plot in plots.items() if plot is not None}


def _by_suite(methods: JsonObject, figure: str, colors: JsonObject) -> Plot:
    """Horizontal bars: a group per suite, a bar per method."""
    values = {
        name: {suite: part.get(figure) for suite, part in method["suites"].items()}
        for name, method in methods.items()
    }
    values = {name: row for name, row in values.items() if any(row.values())}
    if not values:
        return None
    suites = list(next(iter(values.values())))
    height = 0.8 / len(values)

    def draw(axes: Axes) -> None:
        for place, (name, row) in enumerate(values.items()):
            at = [i + height * (place - (len(values) - 1) / 2) for i in range(len(suites))]
            widths = [row.get(suite) or 0 for suite in suites]
            axes.barh(at, widths, height, label=name, color=colors[name])
        axes.set_yticks(range(len(suites)), suites)
        axes.invert_yaxis()
        axes.axvline(1, color="black", linewidth=0.8)

    return draw, 1.2 + 0.16 * len(values) * len(suites) + 0.1 * len(values)


def _acceptance(methods: JsonObject, colors: JsonObject) -> Plot:
    rows = {name: row for name, method in methods.items() if (row := method["acceptance_by_depth"])}

    def draw(axes: Axes) -> None:
        for name, row in rows.items():
            axes.plot(range(1, len(row) + 1), row, marker="o", label=name, color=colors[name])
        axes.set(xlabel="depth", ylabel="share of rounds", ylim=(0, 1))
        axes.xaxis.get_major_locator().set_params(integer=True)

    return (draw, 3.2) if rows else None


def _round_parts(methods: JsonObject) -> Plot:
    """Stacked bars of the parts of a round, in milliseconds."""
    rows = {name: row for name, method in methods.items() if (row := method.get("round_s"))}
    if not rows:
        return None

    def draw(axes: Axes) -> None:
        parts = next(iter(rows.values()))
        ends = [[0.0, *accumulate(1000 * row[part] for part in parts)] for row in rows.values()]
        for i, part in enumerate(parts):
            widths = [end[i + 1] - end[i] for end in ends]
            axes.barh(list(rows), widths, left=[end[i] for end in ends], label=part)
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds")

    return draw, 1.4 + 0.3 * len(rows)


def _widths(costs: JsonObject) -> Plot:
    if not costs["widths"]:
        return None
    tokens = [one["tokens"] for one in costs["widths"]]
    bound = costs["bound"]

    def draw(axes: Axes) -> None:
        axes.plot(tokens, [one["seconds"] * 1000 for one in costs["widths"]], "o-", label="pass")
        axes.axhline(bound["floor_s"] * 1000, color="black", linestyle=":", label="memory floor")
        arithmetic = [bound["arithmetic_s"] * 1000 * n for n in tokens]
        axes.plot(tokens, arithmetic, "--", label="arithmetic")
        _scale(axes, tokens, "tokens in the pass")

    return draw, 3.2


def _rounds(costs: Sequence[JsonObject], axis: str, label: str, colors: JsonObject) -> Plot:
    """Milliseconds of a round, one line per method, and of a plain pass."""
    other = "batch" if axis == "context" else "context"
    fixed = min((cost[other] for cost in costs), default=0)
    rows = sorted((cost for cost in costs if cost[other] == fixed), key=lambda one: one[axis])
    if not rows:
        return None
    lines = {
        PLAIN: [(row[axis], row["plain_s"]) for row in rows if _method(row) == _method(rows[0])]
    }
    for name, group in groupby(sorted(rows, key=_method), key=_method):
        lines[name] = [
            (one[axis], one["draft_s"] + one["verify_s"] + one["encode_s"]) for one in group
        ]

    def draw(axes: Axes) -> None:
        for name, points in lines.items():
            places, seconds = zip(*points, strict=True)
            milliseconds = [1000 * value for value in seconds]
            axes.plot(places, milliseconds, marker="o", label=name, color=colors[name])
        _scale(axes, places, label)

    return draw, 3.2


def _method(row: JsonObject) -> str:
    return str(row["method"])


def _scale(axes: Axes, places: Sequence[int], label: str) -> None:
    """Milliseconds over powers of two."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [str(place) for place in places])
    axes.set(xlabel=label, ylabel="milliseconds")
    axes.set_ylim(bottom=0)


def _cut(cut: JsonObject | None, figure: str, label: str) -> Plot:
    methods: JsonObject = {} if cut is None else cut["methods"]
    rows = {
        name: method[figure] for name, method in methods.items() if method.get(figure) is not None
    }

    def draw(axes: Axes) -> None:
        axes.barh(list(rows), list(rows.values()))
        axes.invert_yaxis()
        axes.set_xlabel(label)

    return (draw, 1.0 + 0.3 * len(rows)) if rows else None


def _svg(title: str, draw: Callable[[Axes], None], height: float) -> str:
    """Render a plot; ids differ between plots, because all are on one page."""
    require("The HTML report", "matplotlib")
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**TEXT, "svg.hashsalt": title}):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        labelled = len(axes.get_legend_handles_labels()[1])
        if labelled:
            figure.legend(loc="outside lower center", ncols=min(labelled, 3), frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=NO_METADATA)
    return scalable(buffer.getvalue(), title)


def scalable(svg: str, title: str) -> str:
    """Remove prolog and fixed size from an SVG, and add an accessible name."""
    element = svg[svg.index("<svg") :]
    head, rest = element.split(">", 1)
    head = re.sub(r'\s(?:width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{title}">{rest}'
