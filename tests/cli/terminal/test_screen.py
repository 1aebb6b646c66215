"""Text of models, servers and file names is shown, and never obeyed."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.panel import Panel
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

import moaspec_core.cli
from commands import Cli
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.console import Screen, escape_unsafe
from moaspec_core.cli.terminal.status import quiet_libraries

HOSTILE = {
    "escape": "\x1b[2J\x1b]0;title\x07",
    "8-bit escape": "\x9b2J\x9d0;title\x9c",
    "bell": "\x07",
    "backspace": "abc\x08\x08\x08",
    "carriage return": "true\rfalse",
    "delete": "\x7f",
    "direction": "\u202egpj.exe\u2066",
    "half a pair": "\udc1b\ud83d",
    "null": "\x00",
}


def test_characters_that_the_encoding_lacks_are_escaped() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, "cp1252")
    Screen(file=file).print("\N{HONEYBEE} d\xe9j\xe0")
    file.flush()
    assert raw.getvalue().split() == [b"\\U0001f41d", b"d\xe9j\xe0"]


def is_harmless(text: str) -> bool:
    return not re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", text
    )


def in_table(text: str) -> Table:
    table = Table(text, title=text, caption=text)
    table.add_row(text)
    return table


FORMS: dict[str, Callable[[str], object]] = {
    "str": str,
    "text": Text,
    "table": in_table,
    "panel": lambda text: Panel(Text(text), title=Text(text)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("terminal", [False, True])
def test_what_reaches_the_terminal(what: str, form: str, terminal: bool) -> None:
    file = io.StringIO()
    screen = Screen(file=file, force_terminal=terminal, color_system=None, width=200)
    screen.print(FORMS[form](f"before {HOSTILE[what]} behind"))
    assert is_harmless(file.getvalue())
    assert "before" in file.getvalue()
    assert "behind" in file.getvalue()


def test_live_text_is_harmless_and_its_movements_are_not_lost() -> None:
    file = io.StringIO()
    screen = Screen(file=file, force_terminal=True, color_system="standard", width=200)
    with Progress(TextColumn("{task.description}", markup=False), console=screen) as shown:
        shown.add_task(HOSTILE["escape"])
    assert "\x1b[2J" not in file.getvalue()
    assert "\\x1b[2J" in file.getvalue()
    assert "\x1b[?25l" in file.getvalue()  # the cursor, hidden meanwhile


@given(st.text(st.characters(codec=None)))
def test_everything_else_stays(text: str) -> None:
    shown = escape_unsafe(text)
    assert is_harmless(shown)
    assert (shown == text) == is_harmless(text)


@pytest.mark.parametrize("say", [console.error, console.print_wrapped])
def test_messages(say: Callable[[str], None], capfd: pytest.CaptureFixture[str]) -> None:
    say(HOSTILE["escape"])
    told = capfd.readouterr()
    assert is_harmless(told.out + told.err)
    assert "2J" in told.out + told.err


def test_log_records_that_no_handler_takes() -> None:
    quiet_libraries()
    record = logging.LogRecord("moaspec.x", logging.WARNING, "", 1, HOSTILE["escape"], None, None)
    assert logging.lastResort is not None
    assert is_harmless(logging.lastResort.format(record))


@pytest.mark.parametrize(
    "arguments",
    [
        ("info", "{}"),
        ("generate", "text", "--target", "{}"),
        ("generate", "text", "--threads", "{}"),
        ("{}",),
        ("data", "{}"),
    ],
)
def test_names_in_errors(arguments: tuple[str, ...], cli: Cli) -> None:
    done = cli(*(one.format("\x1b[2J\u202e") for one in arguments))
    assert done.code == 2
    assert is_harmless(done.err)
    assert is_harmless(done.out)


def test_all_consoles_are_screens() -> None:
    (folder,) = moaspec_core.cli.__path__
    made = [path.name for path in Path(folder).glob("*.py") if " Console(" in path.read_text()]
    assert made == []
