"""docs/cli.md is generated from the commands."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.markup import render
from typer.core import TyperGroup

from commands import Cli
from moaspec_core.cli.main import app

ROOT = Path(__file__).parents[2]


def test_the_command_reference_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    """Run `make docs` when this fails."""
    runpy.run_path(str(ROOT / "scripts" / "cli_reference.py"), run_name="__main__")
    fresh = capsys.readouterr().out
    assert fresh == (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")


def test_it_is_plain_markdown() -> None:
    """Neither entities, nor tags that a browser would swallow."""
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    assert not re.findall(r"&#?\w+;", text)
    assert not re.findall(r"<[a-z/!][^>]*>", prose)


def _helps(command: Any) -> Iterator[str]:
    yield command.help or ""
    yield from (getattr(one, "help", None) or "" for one in command.params)
    if isinstance(command, TyperGroup):
        for each in command.commands.values():
            yield from _helps(each)


def test_help_shows_all_of_its_text() -> None:
    """Words in [brackets] may be taken for markup, and vanish."""
    texts = list(_helps(typer.main.get_command(app)))
    assert len(texts) > 100
    assert [text for text in texts if render(text, emoji=False).plain != text] == []


def _commands(command: Any, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield names, command
    if isinstance(command, TyperGroup):
        for name, each in command.commands.items():
            yield from _commands(each, *names, name)


@pytest.mark.slow
def test_help_fits_80_columns(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is longer, nothing is cut off, and the list of commands has whole sentences."""
    monkeypatch.setenv("COLUMNS", "80")
    for names, command in _commands(typer.main.get_command(app)):
        shown = cli(*names, "--help").out
        assert max(map(len, shown.splitlines())) <= 80
        assert "…" not in shown
        _, _, listed = shown.partition("\nCommands:\n")
        assert "..." not in listed
        words = set(shown.split())
        for option in (one for one in command.params if one.param_type_name == "option"):
            assert set(option.opts) <= words
