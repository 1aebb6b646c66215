"""Tables in terminals of different widths."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from moaspec_core.cli.terminal.table import Table, rendered

WIDTHS = st.integers(60, 140)
WORDS = st.text("abcdefgh,./@%-", min_size=1, max_size=20)
TEXTS = st.lists(WORDS, max_size=4).map(" ".join)


def shown(table: Table, width: int) -> list[str]:
    """Its lines in a terminal of this width."""
    console = Console(width=width, file=io.StringIO(), soft_wrap=True, markup=False, emoji=False)
    console.print(rendered(table, width))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@st.composite
def tables(draw: st.DrawFn) -> Table:
    columns, rows = draw(st.integers(1, 12)), draw(st.integers(0, 5))
    line = st.lists(TEXTS, min_size=columns, max_size=columns)
    return Table(
        draw(line),
        draw(st.lists(line, min_size=rows, max_size=rows)),
        draw(TEXTS),
        grouped=draw(st.booleans()),
    )


@pytest.mark.slow
@settings(deadline=None)
@given(table=tables(), width=WIDTHS)
def test_no_word_is_broken_or_lost_and_no_line_is_too_long(table: Table, width: int) -> None:
    lines = shown(table, width)
    assert max(map(len, lines), default=0) <= width
    words = {word for line in lines for word in line.split()}
    rows = table.rows
    needed = {word for row in rows for cell in row for word in cell.split()}
    assert needed <= words | {word.removesuffix(":") for word in words}


ROWS = Table(("method", "tokens/s", "tau"), [("plain", "66.1", "1.00"), ("moa", "92.1", "2.31")])


def test_rows_are_lines_where_they_fit() -> None:
    assert shown(ROWS, 80) == [
        "method  tokens/s   tau",
        "──────────────────────",
        "plain       66.1  1.00",
        "moa         92.1  2.31",
    ]


def test_a_table_with_more_columns_than_fit_is_turned() -> None:
    assert shown(ROWS, 21) == [
        "method    plain   moa",
        "─────────────────────",
        "tokens/s   66.1  92.1",
        "tau        1.00  2.31",
    ]


def test_a_table_with_too_much_of_both_comes_row_by_row() -> None:
    many = Table(("n", *map(str, range(10, 20))), [(str(i), *["123"] * 10) for i in range(12)])
    assert shown(many, 30)[:4] == ["n     0", "───────", "10  123", "11  123"]


def test_long_cells_wrap_between_words() -> None:
    table = Table(("", ""), [("target", "a model of some name"), ("disk", "x")], "In all two rows")
    assert shown(table, 20) == [
        "In all two rows",
        "target  a model of",
        "        some name",
        "disk    x",
    ]


def test_what_belongs_together_is_named_once() -> None:
    table = Table(("setting", "n"), [("greedy", "1"), ("greedy", "2"), ("warm", "3")], grouped=True)
    lines = shown(table, 80)
    assert [line.split() for line in lines[2:]] == [["greedy", "1"], ["2"], [], ["warm", "3"]]
