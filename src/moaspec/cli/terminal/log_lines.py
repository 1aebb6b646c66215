"""What the package logs while a status line is shown."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status
from rich.text import Text

log = logging.getLogger("moaspec")


class _Notes(logging.Handler):
    """Long steps (INFO) change the status line, or are printed where there is none."""

    def __init__(self, console: Console, status: Status) -> None:
        super().__init__(logging.INFO)
        self._console, self._status = console, status

    def emit(self, record: logging.LogRecord) -> None:
        text = Text(record.getMessage())
        if record.levelno > logging.INFO:
            self._console.print(text, style="yellow")
        elif self._console.is_terminal:
            self._status.update(text)
        else:
            self._console.print(text)


@contextmanager
def noted(console: Console, status: Status) -> Iterator[None]:
    """Show the package's log records in this status line."""
    notes, level = _Notes(console, status), log.level
    log.addHandler(notes)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(notes)
