"""A report as Markdown with plots in files, for a README or documentation page."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moaspec.errors import InputError
from moaspec.evaluate.correctness.equality import EARLIER_RULE
from moaspec.evaluate.file_names import BEGIN, END
from moaspec.evaluate.report.comparison import read_report
from moaspec.evaluate.report.html_page import read_side_results
from moaspec.evaluate.report.plots import draw_plots
from moaspec.evaluate.report.report import GREEDILY
from moaspec.evaluate.results_store import write_whole

NUM_SHORT_PLOTS = 2
"""Number of plots between the markers; a file without markers gets all plots."""

Facts = Mapping[str, Any]


def write_markdown(results: Path, path: Path) -> None:
    """Write tables and plots into a Markdown file; the plots are files in a directory beside it.

    Args:
        results: directory with `report.json`.
        path: the file. If it has the lines `BEGIN` and `END`, a short version replaces the text
            between them; otherwise the whole file is written.

    Raises:
        DataError: no report.
        InputError: matplotlib is not installed, or the file's directory does not exist.
    """
    if not path.parent.is_dir():
        raise InputError(f"There is no directory {path.parent} for {path.name}; make it first.")
    facts = read_report(results)
    plots = draw_plots(facts, *read_side_results(results, facts))
    old = _text_of(path)
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if begin and end:
        shown = dict(list(plots.items())[:NUM_SHORT_PLOTS])
        text = f"{_summary(facts)}\n\n{_images(shown, path)}"
        write_whole(path, f"{before}{BEGIN}\n{text}\n{END}{after}")
    else:
        text = f"# Results\n\n{_summary(facts)}\n\n{_by_suite(facts)}\n\n{_images(plots, path)}\n"
        write_whole(path, text)


def _text_of(path: Path) -> str:
    """The text of the file, or "" if it does not exist."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no Markdown file: {error}. Name another one.") from error


def _summary(facts: Facts) -> str:
    """A sentence about the measurement, and a table with a row per method."""
    prompts = max(len(method["prompts"]) for method in facts["methods"].values())
    machine, threads = facts["machine"], facts["threads"]
    setting = (
        f"{facts['target']}, {facts['dtype']}, {threads} thread{'s' * (threads != 1)} of "
        f"{machine['gpu'] or machine['processor']}, {facts.get('choice', GREEDILY)}, "
        f"{prompts} prompts, all methods in turn in one process. "
        f"{facts.get('rule', EARLIER_RULE)} A speed-up is only given where all texts are the "
        "target's."
    )
    if facts["skipped"]:
        setting += f" {len(facts['skipped'])} turns are left out: they do not fit."
    over = f"speed-up over {facts['baseline']} (median)"
    headings = ("method", "tokens/s (total)", over, "tau", "text", "ties")
    rows = [_method_row(name, method) for name, method in facts["methods"].items()]
    return f"{setting}\n\n{_table(headings, rows)}"


def _method_row(name: str, method: Facts) -> Sequence[str]:
    speedup = method["median_speedup"]
    return (
        f"`{name}`",
        _number(method["tokens_per_s"], ".1f"),
        "" if speedup is None else f"{speedup:.2f}x",
        _number(method["tau"], ".2f"),
        "the target's" if method["lossless"] else "**lossy**",
        str(method.get("ties", "")),
    )


def _by_suite(facts: Facts) -> str:
    methods = {name: each for name, each in facts["methods"].items() if each["tau"] is not None}
    suites = list(next(iter(methods.values()), {"suites": {}})["suites"])
    rows = [
        (f"`{name}`", *(_number(method["suites"][suite]["tau"], ".2f") for suite in suites))
        for name, method in methods.items()
    ]
    return _table(("tau", *suites), rows)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _images(plots: Mapping[str, str], path: Path) -> str:
    """Write the plots to files, and return the lines that show them."""
    directory = path.parent / ("docs" if (path.parent / "docs").is_dir() else "") / "results"
    directory.mkdir(parents=True, exist_ok=True)
    lines = []
    for title, svg in plots.items():
        file = directory / f"{re.sub('[^a-z0-9]+', '-', title.lower()).strip('-')}.svg"
        file.write_text(svg, encoding="utf-8")
        lines.append(f"![{title}]({os.path.relpath(file, path.parent)})")
    return "\n\n".join(lines)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
