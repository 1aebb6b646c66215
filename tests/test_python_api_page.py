"""docs/python-api.md names things that exist."""

from __future__ import annotations

import re
from pathlib import Path
from pkgutil import resolve_name

import pytest

PAGE = Path(__file__).parents[1] / "docs/python-api.md"


@pytest.mark.parametrize("name", re.findall(r"^::: (\S+)$", PAGE.read_text(), re.MULTILINE))
def test_the_page_names_what_exists(name: str) -> None:
    assert resolve_name(name) is not None
