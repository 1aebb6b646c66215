"""Progress bar and stop message of commands that write rows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from moaspec.cli.terminal import console
from moaspec.cli.terminal.progress_bar import ProgressBar
from moaspec.train.dataset.journal import Journal
from moaspec.train.stopping import EXIT_UNFINISHED, StopCause, StopCondition


class _TimeUpError(Exception):
    """The time that `--for` gave is over."""


class WritingProgress(ProgressBar):
    """A progress bar of rows with tokens per second; ends the run when its time is up."""

    def __init__(self, name: str, total: int, stop: StopCondition) -> None:
        super().__init__(name, total, transient=False)
        self._stop = stop
        self._tokens, self._started = 0, time.perf_counter()

    def resume(self, done: int) -> None:
        """Begin after the rows of an earlier run."""
        super().resume(done)
        self._started = time.perf_counter()

    def add(self, tokens: int, finished: int) -> None:
        """Count tokens and finished rows of one engine step."""
        self._tokens += tokens
        elapsed = time.perf_counter() - self._started
        speed = f"{self._tokens / max(elapsed, 1e-9):.1f} tokens/s"
        self.update(int(self.task.completed) + finished, speed)
        if self._stop.due is StopCause.TIME:
            raise _TimeUpError


@contextmanager
def stoppable(journal: Journal) -> Iterator[None]:
    """Print which rows are saved when the user stops, the time is up, or the device is lost."""
    from moaspec.train.run_failures import explain_failures

    try:
        with explain_failures("while decoding", lambda: f"{journal.rows} rows before are intact."):
            yield
    except (KeyboardInterrupt, _TimeUpError) as reason:
        console.warn(
            f"Stopped. {journal.rows} rows are in {journal.path}; run the same command again to "
            "continue."
        )
        if isinstance(reason, KeyboardInterrupt):
            raise
        raise typer.Exit(EXIT_UNFINISHED) from reason
