"""Ctrl-C during output: recorded, so that the output in progress is complete."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 2.0
"""A second Ctrl-C raises if it comes this long after the first: something hangs."""


class Interrupts:
    """Whether Ctrl-C was pressed; inside `deferred_interrupts` it raises nothing."""

    def __init__(self) -> None:
        self._first: float | None = None

    def __bool__(self) -> bool:
        return self._first is not None

    def record(self, *_: object) -> None:
        """Handle the signal without interrupting output, which would lose or repeat some."""
        now = time.monotonic()
        if self._first is not None and now - self._first > PATIENCE_S:
            raise KeyboardInterrupt
        self._first = now if self._first is None else self._first


@contextmanager
def deferred_interrupts() -> Iterator[Interrupts]:
    """Record Ctrl-C during streamed output and the summary after it."""
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = signal.signal(signal.SIGINT, interrupts.record)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
