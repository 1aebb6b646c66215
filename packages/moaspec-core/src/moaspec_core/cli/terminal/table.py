"""Tables as data, shown by rich so that no word is broken."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from textwrap import wrap

from rich import box
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from moaspec_core.cli.terminal import console

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
        return Table(first, others)


def show_table(table: Table) -> None:
    """Print the table in the width of the terminal."""
    console.out.print(rendered(table, console.out.width))


def rendered(table: Table, width: int) -> RenderableType:
    """Rows as lines where these fit into the width, else columns as lines, else row by row."""
    forms = [[table], [table.turned], [replace(table, rows=[row]).turned for row in table.rows]]
    fitting = [form for form in forms if all(_widths(one, width) for one in form)]
    title = [Text(line, style="bold") for line in wrap(table.title, width)]
    return Group(*title, *(_grid(one, width) for one in (fitting or forms)[0]))


def _widths(table: Table, width: int) -> list[int] | None:
    """Widths of the columns, None if one word does not fit. rich's own widths break words."""
    least = [max(map(cell_len, " ".join(column).split()), default=1) for column in table.columns]
    widths = [max(1, *map(cell_len, column)) for column in table.columns]
    room = width - GAP * (len(widths) - 1)
    if sum(least) > room:
        return None
    while sum(widths) > room:
        able = [index for index, one in enumerate(widths) if one > least[index]]
        widths[max(able, key=widths.__getitem__)] -= 1
    return widths


def _grid(table: Table, width: int) -> RenderableType:
    grid = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    grid.show_header = any(table.headings)
    widths: Sequence[int | None] = _widths(table, width) or [None] * len(table.headings)
    for index, (column, columns) in enumerate(zip(table.columns, widths, strict=True)):
        numbers = index > 0 and all(map(_NUMBER.match, column[1:]))
        grid.add_column(Text(column[0]), width=columns, justify="right" if numbers else "left")
    above = ""
    for first, *others in table.rows:
        repeated = table.grouped and first == above
        if table.grouped and above and not repeated:
            grid.add_section()
        grid.add_row(*map(Text, ("" if repeated else first, *others)))
        above = first
    return grid
