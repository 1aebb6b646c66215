"""Stop a run on Ctrl-C, on SIGTERM or after a time limit."""

import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType

from moaspec_core.errors import InputError

EXIT_UNFINISHED = 75
"""Exit code of a command that reached its time limit (`--for`): EX_TEMPFAIL of sysexits."""


class StopCause(IntEnum):
    """Why a run stopped; if processes differ, the largest value applies."""

    FINISHED = 0
    TIME = 1
    INTERRUPTED = 2
    TERMINATED = 3


class StopCondition:
    """Checks whether to stop.

    Args:
        seconds: time limit from now on; None for no limit.

    Attributes:
        signal: number of the signal that arrived, if one did.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self.signal: int | None = None

    @property
    def due(self) -> StopCause:
        """Why to stop after this step; FINISHED means go on."""
        if self.signal is not None:
            ended = self.signal == signal.SIGTERM
            return StopCause.TERMINATED if ended else StopCause.INTERRUPTED
        late = self._deadline is not None and time.monotonic() >= self._deadline
        return StopCause.TIME if late else StopCause.FINISHED

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Make the first SIGINT or SIGTERM set `due`; the second one acts as before.

        Only the main thread can handle signals; in other threads nothing changes.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        caught = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.getsignal(number) for number in caught}

        def handle(number: int, _: FrameType | None) -> None:
            self.signal = number
            signal.signal(number, before[signal.Signals(number)])

        for number in caught:
            signal.signal(number, handle)
        try:
            yield
        finally:
            for number in caught:
                signal.signal(number, before[number])


def parse_duration(text: str) -> float:
    """Convert "8m", "90s", "1.5h" or "45" (seconds) to seconds; InputError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None or not float(match[1]):
        raise InputError(f"Expected a duration such as 8m, 90s or 1.5h, got {text!r}.")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
