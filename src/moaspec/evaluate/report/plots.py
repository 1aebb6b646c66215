"""Plots of a report as inline SVG, drawn without a display and without global state."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from moaspec.support.extras import require

WIDTH = 5.0
"""Width of a plot in inches; narrow, so that its text is legible on a phone."""

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
Facts = Mapping[str, Any]


def draw_plots(
    facts: Facts, costs: Facts | None = None, cut: Facts | None = None
) -> dict[str, str]:
    """Draw all plots that have data, by title.

    Returns:
        SVG elements, which scale with their container.

    Raises:
        InputError: matplotlib is not installed.
    """
    methods: Facts = facts.get("methods", {})
    base = facts.get("baseline", "plain")
    colors = _colors(facts, costs)
    plots = {
        f"Speed-up over {base}": _by_suite(methods, "median_speedup", colors),
        "Tokens per round (tau)": _by_suite(methods, "tau", colors),
        "Acceptance by depth": _acceptance(methods, colors),
        "Time in a round": _round_parts(methods),
    }
    if costs is not None:
        plots["A pass over several tokens"] = _widths(costs)
        plots["Round against context"] = _rounds(costs, "context", colors)
        plots["Round against batch"] = _rounds(costs, "batch", colors)
    if cut is not None:
        plots["Alone after a cut: likelihood"] = _cut(cut, "log_likelihood", "log-probability")
        plots["Alone after a cut: agreement"] = _cut(cut, "agreement", "share of tokens")
        plots["Alone after a cut: right answers"] = _cut(cut, "accuracy", "share of answers")
    return {title: _svg(title, *plot) for title, plot in plots.items() if plot is not None}


Plot = tuple[Callable[[Axes], None], float]
"""The function that draws, and the height in inches."""


def _colors(facts: Facts, costs: Facts | None) -> dict[str, str]:
    """The colour of each method, the same in all plots."""
    names = [PLAIN, *facts.get("methods", {})]
    names += [cost["method"] for cost in (costs or {}).get("rounds", ())]
    return {name: f"C{i}" for i, name in enumerate(dict.fromkeys(names))}


def _by_suite(methods: Facts, figure: str, colors: Facts) -> Plot | None:
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
            axes.barh(
                at,
                [row.get(suite) or 0 for suite in suites],
                height,
                label=name,
                color=colors[name],
            )
        axes.set_yticks(range(len(suites)), suites)
        axes.invert_yaxis()
        axes.axvline(1, color="black", linewidth=0.8)
        _legend(axes, len(values))

    return draw, 1.2 + 0.16 * len(values) * len(suites) + 0.1 * len(values)


def _acceptance(methods: Facts, colors: Facts) -> Plot | None:
    rows = {name: one["acceptance_by_depth"] for name, one in methods.items()}
    rows = {name: row for name, row in rows.items() if row}
    if not rows:
        return None

    def draw(axes: Axes) -> None:
        for name, row in rows.items():
            axes.plot(range(1, len(row) + 1), row, marker="o", label=name, color=colors[name])
        axes.set_xlabel("depth")
        axes.set_ylabel("share of rounds")
        axes.set_ylim(0, 1)
        axes.xaxis.get_major_locator().set_params(integer=True)
        _legend(axes, len(rows))

    return draw, 3.2


def _round_parts(methods: Facts) -> Plot | None:
    """Stacked bars of the parts of a round, in milliseconds."""
    rows = {name: one.get("round_s") for name, one in methods.items()}
    rows = {name: row for name, row in rows.items() if row}
    if not rows:
        return None

    def draw(axes: Axes) -> None:
        left = [0.0] * len(rows)
        for part in next(iter(rows.values())):
            widths = [row[part] * 1000 for row in rows.values()]
            axes.barh(list(rows), widths, left=left, label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds")
        _legend(axes, 4)

    return draw, 1.4 + 0.3 * len(rows)


def _widths(costs: Facts) -> Plot:
    tokens = [one["tokens"] for one in costs["widths"]]
    bound = costs["bound"]

    def draw(axes: Axes) -> None:
        axes.plot(tokens, [one["seconds"] * 1000 for one in costs["widths"]], "o-", label="pass")
        axes.axhline(bound["floor_s"] * 1000, color="black", linestyle=":", label="memory floor")
        arithmetic = [bound["arithmetic_s"] * 1000 * n for n in tokens]
        axes.plot(tokens, arithmetic, "--", label="arithmetic")
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, [str(n) for n in tokens])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens in the pass")
        axes.set_ylabel("milliseconds")
        _legend(axes, 3)

    return draw, 3.2


def _rounds(costs: Facts, axis: str, colors: Facts) -> Plot | None:
    """Milliseconds of a round, one line per method, and of a plain pass."""
    other = "batch" if axis == "context" else "context"
    fixed = min((one[other] for one in costs["rounds"]), default=0)
    rows = [one for one in costs["rounds"] if one[other] == fixed]
    lines = {
        name: [(one[axis], one["draft_s"] + one["verify_s"] + one["encode_s"]) for one in group]
        for name, group in groupby(sorted(rows, key=_method), key=_method)
    }
    if not lines:
        return None
    first = rows[0]["method"]
    lines = {PLAIN: [(one[axis], one["plain_s"]) for one in rows if one["method"] == first]} | lines

    def draw(axes: Axes) -> None:
        for name, points in lines.items():
            places, seconds = zip(*sorted(points), strict=True)
            milliseconds = [1000 * value for value in seconds]
            axes.plot(places, milliseconds, marker="o", label=name, color=colors[name])
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [str(place) for place in places])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens of context" if axis == "context" else "rows")
        axes.set_ylabel("milliseconds")
        _legend(axes, len(lines))

    return draw, 3.2


def _method(row: Facts) -> str:
    return str(row["method"])


def _cut(cut: Facts, figure: str, label: str) -> Plot | None:
    methods = cut["methods"].items()
    rows = {name: one[figure] for name, one in methods if one.get(figure) is not None}
    if not rows:
        return None

    def draw(axes: Axes) -> None:
        axes.barh(list(rows), list(rows.values()))
        axes.invert_yaxis()
        axes.set_xlabel(label)

    return draw, 1.0 + 0.3 * len(rows)


def _legend(axes: Axes, entries: int) -> None:
    axes.figure.legend(loc="outside lower center", ncols=min(entries, 3), frameon=False)


def _svg(title: str, draw: Callable[[Axes], None], height: float) -> str:
    """Render a plot; ids differ between plots, because all are on one page."""
    matplotlib, figure_class = _matplotlib()
    with matplotlib.rc_context({**TEXT, "svg.hashsalt": title}):
        figure = figure_class(figsize=(WIDTH, height), layout="constrained")
        draw(figure.add_subplot())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=NO_METADATA)
    return scalable(buffer.getvalue(), title)


def scalable(svg: str, title: str) -> str:
    """Remove prolog and fixed size from an SVG, and add an accessible name."""
    element = svg[svg.index("<svg") :]
    head, rest = element.split(">", 1)
    head = re.sub(r'\s(?:width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{title}">{rest}'


def _matplotlib() -> Sequence[Any]:
    require("The HTML report", "report")
    import matplotlib
    from matplotlib.figure import Figure

    return matplotlib, Figure
