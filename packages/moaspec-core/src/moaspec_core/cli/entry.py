"""Entry point of the `moaspec` command."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

INTERRUPTED = 130  # exit code of a command that Ctrl-C has ended


def run() -> None:
    """Load the commands, then run one; see `moaspec_core.cli.main.run`."""
    open_closed_streams()
    with exit_on_interrupt():
        from moaspec_core.cli import main
    main.run()


def open_closed_streams() -> None:
    """Open standard streams that the caller has closed, so that no other file takes their place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            file = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - until the end
            setattr(sys, name, file)


@contextmanager
def exit_on_interrupt(first: Callable[[], object] = lambda: None) -> Iterator[None]:
    """End the process at once on Ctrl-C, for imports that take seconds.

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
