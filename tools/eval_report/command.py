"""The commands `moaspec eval page` and `moaspec eval compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moaspec.cli.options import Json
from moaspec.cli.terminal import console
from moaspec.cli.terminal.status import status
from moaspec.cli.terminal.tables.report_tables import number
from moaspec.cli.terminal.tables.table import Table, show_table
from moaspec.errors import InputError

if TYPE_CHECKING:
    from eval_report.comparison import Comparison, Interval


def page(
    directory: Annotated[Path, typer.Argument(help="Directory that --out of moaspec eval named.")],
    markdown: Annotated[
        list[Path] | None,
        typer.Option(
            help="Also write tables and plots into this Markdown file: between its lines "
            "`<!-- results -->` and `<!-- /results -->` where it has them, else as a whole. May be "
            "given several times."
        ),
    ] = None,
) -> None:
    """Write report.html anew, in a checkout.

    Example: moaspec eval page results --markdown docs/results.md
    """
    from eval_report.pages import write_markdown, write_page

    try:
        with status("Drawing the report"):
            written = [write_page(directory)]
            for path in markdown or ():
                write_markdown(directory, path)
                written.append(path)
    except OSError as error:
        raise InputError(f"The page cannot be written: {error}.") from error
    console.out.print(f"Written: {', '.join(map(str, written))}")


def compare(
    before: Annotated[Path, typer.Argument(help="A report.json, or its directory.")],
    after: Annotated[Path, typer.Argument(help="The one to compare with it.")],
    as_json: Json = False,
) -> None:
    """Compare two reports, in a checkout.

    Changes have 95% confidence intervals over prompts.

    Example: moaspec eval compare results/before results/after
    """
    from eval_report.comparison import compare_reports, read_report

    found = compare_reports(read_report(before), read_report(after))
    if as_json:
        console.out.print(json.dumps(found.as_json()))
    else:
        show_comparison(found)


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
            f"{number(one.tau_before)} to {number(one.tau_after)}",
            _interval(one.tau, "+.2f"),
            _interval(one.speed, ".2f"),
        )
        for one in found.changes
    ]
    headings = ("method", "prompts", "tau", "change of tau (95%)", "speed ratio (95%)")
    return Table(headings, rows)


def _interval(interval: Interval | None, form: str) -> str:
    if interval is None:
        return ""
    if interval.low is None or interval.high is None:
        return f"{interval.value:{form}} (too few to say)"
    return f"{interval.value:{form}} ({interval.low:{form}} to {interval.high:{form}})"
