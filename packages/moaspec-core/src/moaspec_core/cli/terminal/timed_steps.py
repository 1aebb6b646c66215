"""Consecutive slow steps: one line each, with the time that it took."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from moaspec_core.cli.terminal.console import is_live


class TimedSteps:
    """Prints one line per slow step, with the time that it took; `seconds` has it by the words."""

    def __init__(self, screen: Console) -> None:
        self._screen = screen
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, words: str, expected: str = "") -> Iterator[Callable[[], None]]:
        """Run a step inside this context; `expected` is its time, if it is long.

        Yields:
            A function that leaves the terminal clean, for a process that ends within the step.
        """
        announced = f"{words} ({expected})" if expected else words
        started = time.perf_counter()
        if is_live(self._screen):
            columns = (SpinnerColumn("line"), TextColumn(announced), TimeElapsedColumn())
            # Few redraws: they take CPU time from measurements.
            with Progress(
                *columns, console=self._screen, transient=True, refresh_per_second=4
            ) as shown:
                shown.add_task("")
                shown.refresh()  # by itself it waits for its thread's first turn
                yield shown.stop
            self._screen.print(f"{announced} ... ", end="")
        else:
            self._screen.print(f"{announced} ... ", end="")
            try:
                yield self._screen.print
            except BaseException:
                self._screen.print()
                raise
        self.seconds[words] = time.perf_counter() - started
        self._screen.print(f"{self.seconds[words]:.1f} s")
