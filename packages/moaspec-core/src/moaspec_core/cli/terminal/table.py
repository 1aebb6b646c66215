"""A table as data, and its form in a terminal of a given width.

A table is shown with its rows as lines where that fits, else turned by 90 degrees, else row by row
with a line for each cell. Cells wrap between words and never inside one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap

from rich import box
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from moaspec_core.cli.terminal import console

HEADING_LINES = 3
CELL_LINES = (1, 2)  # how tall cells may be: at best, and where nothing else fits
ANY_LINES = 1000  # of names and values, which read well however tall they are
GAP = 2  # blanks between two columns
_NUMBER = re.compile(r"[-+]?\d|$")


@dataclass(frozen=True)
class Table:
    """Rows and headings of a table."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    # Neighbouring rows with the same first cell belong together; it is shown once.
    grouped: bool = False

    @property
    def columns(self) -> list[tuple[str, ...]]:
        return list(zip(self.headings, *self.rows, strict=True))

    @property
    def turned(self) -> Table:
        """Columns as rows; the first column becomes the headings."""
        first, *others = self.columns
        return Table(first, others, self.title)


def show_table(table: Table) -> None:
    """Print the table in the width of the terminal."""
    console.out.print(rendered(table, console.out.width))


def rendered(table: Table, width: int) -> RenderableType:
    """The lines of the table in a terminal of this width."""
    title = [Text(line, style="bold") for line in _wrapped(table.title, width)]
    forms = [table] if table.grouped else [table, table.turned]
    tries = list(itertools.product(CELL_LINES, forms))
    if len(table.rows) == 1:  # a single turned row is a list without headings: the last resort
        tries.sort(key=lambda one: one[1] is not table)
    if len(table.headings) == 2:
        tries = [(ANY_LINES, table)]
    for lines, form in tries:
        widths = _widths(form.columns, width, lines)
        if widths is not None:
            return Group(*title, _grid(form, widths))
    return Group(*title, *(Text(line) for row in table.rows for line in _block(table, row, width)))


def _widths(columns: Sequence[Sequence[str]], width: int, lines: int) -> list[int] | None:
    """Widths of the columns, or None where they do not fit beside one another."""
    least = [_least_width(column, lines) for column in columns]
    widths = [max(1, *map(cell_len, column)) for column in columns]
    room = width - GAP * (len(widths) - 1)
    if sum(least) > room:
        return None
    while sum(widths) > room:
        able = [index for index, one in enumerate(widths) if one > least[index]]
        widths[max(able, key=widths.__getitem__)] -= 1
    return widths


def _least_width(column: Sequence[str], lines: int) -> int:
    """The smallest width that breaks no word and makes no cell too tall."""
    heading, *cells = column
    return max(_width_for(heading, HEADING_LINES), *(_width_for(cell, lines) for cell in cells), 1)


def _width_for(text: str, lines: int) -> int:
    least = max(map(cell_len, text.split()), default=0)
    sizes = range(max(1, least), cell_len(text) + 1)
    return next((width for width in sizes if len(_wrapped(text, width)) <= lines), least)


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _grid(table: Table, widths: Sequence[int]) -> RenderableType:
    grid = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    grid.show_header = any(table.headings)
    for index, (column, width) in enumerate(zip(table.columns, widths, strict=True)):
        numbers = index > 0 and all(map(_NUMBER.match, column[1:]))
        grid.add_column(Text(column[0]), width=width, justify="right" if numbers else "left")
    above = ""
    for row in table.rows:
        if table.grouped and above and row[0] != above:
            grid.add_section()
        first = "" if table.grouped and row[0] == above else row[0]
        above = row[0]
        grid.add_row(*map(Text, (first, *row[1:])))
    return grid


def _block(table: Table, row: Sequence[str], width: int) -> Iterator[str]:
    """A row by itself, one line per cell."""
    for index, (heading, cell) in enumerate(zip(table.headings, row, strict=True)):
        lead = "  " if index else ""
        text = f"{heading}: {cell}" if heading else cell
        yield from (lead + line for line in _wrapped(text, width - len(lead), "  "))
