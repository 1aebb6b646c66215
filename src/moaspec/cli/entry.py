"""Entry point of the `moaspec` command."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERRUPTED = 130  # exit code of a command that Ctrl-C has ended


def run() -> None:
    """Load the commands, then run one; see `moaspec.cli.main.run`."""
    with exit_on_interrupt():
        from moaspec.cli import main
    main.run()


@contextmanager
def exit_on_interrupt(first: Callable[[], object] = lambda: None) -> Iterator[None]:
    """End the process at once and silently on Ctrl-C, for imports that take seconds.

    A KeyboardInterrupt could be caught anywhere inside the libraries.

    Args:
        first: called before the process ends.
    """

    def leave(*_: object) -> None:
        first()
        os._exit(INTERRUPTED)

    if not _raises():
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _raises() -> bool:
    """Whether Ctrl-C raises an exception in this thread; in the background it is ignored."""
    ours = threading.current_thread() is threading.main_thread()
    return ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler
