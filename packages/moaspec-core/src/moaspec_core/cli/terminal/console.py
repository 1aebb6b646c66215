"""Consoles that show text of models, servers and files without obeying what is in it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

if TYPE_CHECKING:
    from moaspec_core.engine.request_state import Source

DEBUG: ContextVar[bool] = ContextVar("debug", default=False)
STYLES: dict[Source, str] = {"draft": "bold green", "target": "", "copy": "bold cyan"}
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, characters that change the direction of text, and half surrogate pairs."""


def escape_unsafe(text: str) -> str:
    """Write control and direction characters as escapes, as Python does in string literals."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Screen(Console):
    """A console that escapes control characters in text; rich's own styles still work.

    Characters that the encoding lacks are escaped too: output that goes to a file or pipe on
    Windows is not in UTF-8.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            known = escape_unsafe(text).encode(self.encoding, "backslashreplace")
            yield segment if control else Segment(known.decode(self.encoding), style)


# Texts, names and paths are shown as they are: no [markup], no :emoji: in them.
out = Screen(highlight=False, soft_wrap=True, markup=False, emoji=False)
err = Screen(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)
# On a terminal, lines break between words.
err.soft_wrap = not err.is_terminal


def is_live(screen: Console) -> bool:
    """Whether this console can move the cursor of a terminal; FORCE_COLOR makes no pipe one."""
    return screen.is_interactive and screen.file.isatty()


def error(message: str) -> None:
    """Print one line on standard error, without the numbers of the system's errors."""
    message = re.sub(r"\[(Errno|WinError) -?\d+\] ", "", message)
    err.print(Text("Error: ", style="bold red") + Text(message))


def warn(message: str) -> None:
    """Print one yellow line on standard error."""
    err.print(message, style="yellow")


def print_wrapped(message: str, style: str = "") -> None:
    """Print on standard output; on a terminal, lines break between words."""
    out.print(Text(message, style=style), soft_wrap=not out.is_terminal)
