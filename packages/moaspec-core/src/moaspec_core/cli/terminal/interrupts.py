"""Ctrl-C during output, recorded so that the output is complete; SIGTERM as an exception."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

PATIENCE_S = 2.0  # a second Ctrl-C raises if it comes this long after the first: something hangs


TERMINATED = 143  # exit code of a command that SIGTERM has ended


class TerminatedError(BaseException):
    """SIGTERM arrived. Like KeyboardInterrupt it is no Exception, which libraries might catch."""


@contextmanager
def _handled(number: int, handle: Callable[..., None]) -> Iterator[None]:
    """Call `handle` on a signal inside this block; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(number, before)


def raise_on_sigterm() -> AbstractContextManager[None]:
    """Raise a `TerminatedError` on SIGTERM inside this block, if this is the main thread."""

    def leave(*_: object) -> None:
        raise TerminatedError

    return _handled(signal.SIGTERM, leave)


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
    with _handled(signal.SIGINT, interrupts.record):
        yield interrupts
