"""A hook of mkdocs: links to files outside docs/ go to the repository's page of that file."""

from __future__ import annotations

import re
from typing import Any

FILES = "https://github.com/moaspec/moaspec/blob/main/"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page's text with `](../FILE)` replaced; called by mkdocs for every page."""
    return re.sub(r"\]\(\.\./([^)]+)\)", rf"]({FILES}\1)", markdown)
