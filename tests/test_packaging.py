"""What package indexes and installers read of the project."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import moaspec

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_long_description_has_absolute_links(settings: dict[str, Any]) -> None:
    """The README is shown there without the files beside it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    relative = re.findall(r"\]\((?!\w+:|#)([^)#]+)", text)
    assert relative
    assert [name for name in relative if not (ROOT / name).exists()] == []
    hooks = settings["tool"]["hatch"]["metadata"]["hooks"]
    for one in hooks["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(one["pattern"], one["replacement"], text)
    assert re.findall(r"\]\((?!https://|#)[^)]*\)", text) == []


def test_the_version_stands_in_one_place(settings: dict[str, Any]) -> None:
    assert "version" in settings["project"]["dynamic"]
    path = ROOT / settings["tool"]["hatch"]["version"]["path"]
    assert f'__version__ = "{moaspec.__version__}"' in path.read_text(encoding="utf-8")
