"""A report as one self-contained HTML page, and as Markdown with plots in files."""

import base64
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from eval_report.plots import draw_plots
from eval_report.verdict import eval_command, prompt_speedups, speedup, tau_interval, verdict
from moaspec.evaluate.report.comparison import JsonObject, read_report
from moaspec.evaluate.results_store import write_whole
from moaspec_core.errors import DataError, InputError

PAGE, COSTS, CUT = "report.html", "costs.json", "cut.json"
"""Names of files in a directory of results."""

BEGIN, END = "<!-- results -->", "<!-- /results -->"
"""If a Markdown file has both lines, only the text between them is replaced."""

SAME = ("model", "drafter", "dtype", "quantize", "adapter", "device", "threads")
"""Settings that all results on a page must share."""

EARLIER_RULE = "Texts were compared with the baseline's by an earlier version of moaspec."

NUM_SHORT_PLOTS = 2
"""Number of plots between the markers; a Markdown file without markers gets all plots."""


def write_page(directory: Path) -> Path:
    """Write `report.html` for a directory of results; only sorting needs its script.

    Args:
        directory: with `report.json`; `costs.json` and `cut.json` are included if they have the
            same target, drafter and settings.

    Raises:
        DataError: no report, or a damaged file.
        InputError: matplotlib is not installed.
    """
    info, costs, cut = _results(directory)
    path = directory / PAGE
    path.write_text(page(info, draw_plots(info, costs, cut), costs, cut), encoding="utf-8")
    return path


def page(
    info: JsonObject,
    plots: Mapping[str, str],
    costs: JsonObject | None = None,
    cut: JsonObject | None = None,
) -> str:
    """Render the HTML page."""
    script = Path(__file__).with_name("report.js").read_text(encoding="utf-8")
    names = list(info["methods"])
    others = [name for name in names if name != info["baseline"]]
    return _rendered(
        "report.html.j2",
        info=info,
        verdict=verdict(info),
        speedups={name: speedup(info, name) for name in others},
        taus={name: tau_interval(info["methods"][name]) for name in others},
        ratios={name: prompt_speedups(info, name) for name in names},
        command=eval_command(info),
        plots=plots,
        costs=costs,
        cut=cut,
        settings=json.dumps(info["settings"], indent=1),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def write_markdown(results: Path, path: Path) -> None:
    """Write tables and plots into a Markdown file; the plots are files in a directory beside it.

    Args:
        path: the file. If it has the lines `BEGIN` and `END`, a short version replaces the text
            between them; otherwise the whole file is written.

    Raises:
        DataError: no report.
        InputError: matplotlib is not installed, or the file's directory does not exist.
    """
    if not path.parent.is_dir():
        raise InputError(f"There is no directory {path.parent} for {path.name}; make it first.")
    info, costs, cut = _results(results)
    plots = draw_plots(info, costs, cut)
    before, begin, rest = _text_of(path).partition(BEGIN)
    _, end, after = rest.partition(END)
    short = bool(begin and end)
    shown = dict(list(plots.items())[:NUM_SHORT_PLOTS]) if short else plots
    text = _rendered("results.md.j2", info=info, images=_images(shown, path), whole=not short)
    write_whole(path, f"{before}{BEGIN}\n{text}{END}{after}" if short else text)


def _text_of(path: Path) -> str:
    """The text of the file, or "" if it does not exist."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no Markdown file: {error}. Name another one.") from error


def _images(plots: Mapping[str, str], path: Path) -> dict[str, str]:
    """Write the plots to files, and return their paths from the Markdown file by title."""
    directory = path.parent / ("docs" if (path.parent / "docs").is_dir() else "") / "results"
    directory.mkdir(parents=True, exist_ok=True)
    images = {}
    for title, svg in plots.items():
        file = directory / f"{re.sub('[^a-z0-9]+', '-', title.lower()).strip('-')}.svg"
        file.write_text(svg, encoding="utf-8")
        images[title] = os.path.relpath(file, path.parent)
    return images


def _rendered(template: str, **values: Any) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=template.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(earlier_rule=EARLIER_RULE, **values)


def _results(directory: Path) -> tuple[JsonObject, JsonObject | None, JsonObject | None]:
    """Read the report, and costs and cut; None if missing or of other settings."""
    info = read_report(directory)
    costs = _optional(directory / COSTS, {"widths", "rounds", "bound"}, info)
    return info, costs, _optional(directory / CUT, {"after", "methods"}, info)


def _optional(path: Path, keys: set[str], info: JsonObject) -> JsonObject | None:
    if not path.exists():
        return None
    try:
        loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not loaded.keys() >= {*keys, "settings"}:
            raise ValueError(f"expected {', '.join(sorted(keys))} and settings")
        settings, wanted = loaded["settings"], info["settings"]
        return loaded if all(settings.get(key) == wanted.get(key) for key in SAME) else None
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error}); measure it anew.") from error
