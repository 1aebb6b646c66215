"""docs/python-api.md is generated, and can be read as a file."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import moaspec

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/python-api.md").read_text(encoding="utf-8")


def test_the_page_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    """Run `make docs` when this fails."""
    runpy.run_path(str(ROOT / "scripts/python_reference.py"), run_name="__main__")
    assert capsys.readouterr().out == PAGE


def test_it_says_what_is_called_and_how() -> None:
    assert "\n:::" not in PAGE  # a directive, which only the site's builder would fill
    entry = PAGE.partition("### moaspec.generate\n")[2].partition("\n### ")[0]
    assert "generate(\n    target: Target,\n    prompt_ids: Any,\n" in entry
    assert "- `prompt_ids`: token ids" in entry


def test_it_has_the_public_names() -> None:
    """Those that a user calls; others are on the pages of their tools."""
    missing = [name for name in moaspec.__all__ if f"moaspec.{name}" not in PAGE]
    assert missing == []
