"""Consoles on which text of others is only text."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What a terminal obeys, what turns the order of characters, and what has no encoding."""


def harmless(text: str) -> str:
    """A text with these characters written out, as Python writes them in strings."""
    return _UNSHOWN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Screen(Console):
    """A console that shows the text of models, servers and file names, and obeys none of it.

    Styles and movements of the cursor are rich's own, and are no text.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """See `Console`."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(harmless(text), style)
