"""One self-contained page out of a report: no network, no scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from moaspec.evaluate.comparison import read_report
from moaspec.evaluate.plots import draw_plots

COSTS, CUT, PAGE = "costs.json", "cut.json", "report.html"


def write_page(directory: Path) -> Path:
    """Write `report.html` from what lies in a directory of results.

    Args:
        directory: with `report.json`; `costs.json` and `cut.json` are added where they are.

    Raises:
        DataError: no report there.
        InputError: matplotlib is not installed.
    """
    facts = read_report(directory)
    costs, cut = (optional(directory / name) for name in (COSTS, CUT))
    path = directory / PAGE
    path.write_text(page(facts, draw_plots(facts, costs, cut), costs, cut), encoding="utf-8")
    return path


def page(
    facts: Mapping[str, Any],
    plots: Mapping[str, str],
    costs: Mapping[str, Any] | None = None,
    cut: Mapping[str, Any] | None = None,
) -> str:
    """The page's text.

    Args:
        facts: a report's JSON.
        plots: SVG elements by title.
        costs: of `Costs.as_json`.
        cut: of `Cut.as_json`.
    """
    environment = Environment(
        loader=PackageLoader("moaspec.evaluate", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("report.html.j2")
    everything = json.dumps(facts.get("settings", {}), indent=1)
    return template.render(facts=facts, plots=plots, costs=costs, cut=cut, settings=everything)


def optional(path: Path) -> dict[str, Any] | None:
    """What a file of results holds; None where there is no such file."""
    if not path.exists():
        return None
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded
