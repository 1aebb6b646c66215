"""A report as one self-contained HTML page; only sorting needs its script."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from moaspec.errors import DataError
from moaspec.evaluate.correctness.equality import EARLIER_RULE
from moaspec.evaluate.file_names import COSTS, CUT, PAGE
from moaspec.evaluate.report.comparison import read_report
from moaspec.evaluate.report.plots import draw_plots
from moaspec.evaluate.report.verdict import eval_command, prompt_rows, speedup, tau, verdict

SAME = ("model", "drafter", "dtype", "quantize", "device", "threads")
"""Settings that all results on a page must share."""

SCRIPT = "report.js"


def write_page(directory: Path) -> Path:
    """Write `report.html` for a directory of results.

    Args:
        directory: with `report.json`; `costs.json` and `cut.json` are included if they have the
            same target, drafter and settings.

    Raises:
        DataError: no report, or a damaged file.
        InputError: matplotlib is not installed.
    """
    facts = read_report(directory)
    costs, cut = read_side_results(directory, facts)
    path = directory / PAGE
    path.write_text(page(facts, draw_plots(facts, costs, cut), costs, cut), encoding="utf-8")
    return path


def page(
    facts: Mapping[str, Any],
    plots: Mapping[str, str],
    costs: Mapping[str, Any] | None = None,
    cut: Mapping[str, Any] | None = None,
) -> str:
    """Render the page."""
    environment = Environment(
        loader=PackageLoader("moaspec.evaluate.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("report.html.j2")
    others = [name for name in facts["methods"] if name != facts["baseline"]]
    script = (
        importlib.resources.files("moaspec.evaluate.report").joinpath(SCRIPT).read_text("utf-8")
    )
    return template.render(
        facts=facts,
        verdict=verdict(facts),
        speedups={name: speedup(facts, name) for name in others},
        taus={name: tau(facts["methods"][name]) for name in others},
        prompts=prompt_rows(facts),
        command=eval_command(facts),
        earlier_rule=EARLIER_RULE,
        plots=plots,
        costs=costs,
        cut=cut,
        settings=json.dumps(facts["settings"], indent=1),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def read_side_results(
    directory: Path, facts: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Read costs and cut beside a report; None if missing or of other settings.

    Raises:
        DataError: a file is damaged.
    """
    costs = _optional(directory / COSTS, {"widths", "rounds", "bound"}, facts)
    return costs, _optional(directory / CUT, {"after", "methods"}, facts)


def _optional(path: Path, keys: set[str], facts: Mapping[str, Any]) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not loaded.keys() >= {*keys, "settings"}:
            raise ValueError(f"expected {', '.join(sorted(keys))} and settings")
        settings, wanted = loaded["settings"], facts["settings"]
        return loaded if all(settings.get(key) == wanted.get(key) for key in SAME) else None
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error}); measure it anew.") from error
