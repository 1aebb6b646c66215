"""Progress bar and stop message of commands that write rows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.progress import TextColumn

from moaspec.cli.terminal import console
from moaspec.cli.terminal.progress import LongProgress, bar_of
from moaspec.train.dataset.journal import Journal
from moaspec.train.stopping import EXIT_UNFINISHED, StopCause, StopCondition


class _TimeUpError(Exception):
    """The time that `--for` gave is over."""


class Bar:
    """A progress bar with tokens per second of this run.

    Args:
        bar: shows it.
        total: rows to write.
        stop: ends the run when its time is up.
    """

    def __init__(self, bar: LongProgress, total: int, stop: StopCondition) -> None:
        self._bar, self._stop = bar, stop
        self._task = bar.add_task("", total=total, speed="")
        self._tokens, self._started = 0, time.perf_counter()

    def start(self, done: int) -> None:
        """Begin where an earlier run ended."""
        self._bar.reset(self._task, completed=done, before=done, speed="")
        self._started = time.perf_counter()

    def completed(self, done: int) -> None:
        """Show how many are done."""
        self._bar.update(self._task, completed=done)
        self._bar.tell(self._task)

    def advance(self, tokens: int, finished: int) -> None:
        """Count what a step of the engine brought."""
        self._tokens += tokens
        elapsed = time.perf_counter() - self._started
        speed = f"{self._tokens / max(elapsed, 1e-9):.1f} tokens/s"
        self._bar.update(self._task, advance=finished, speed=speed)
        self._bar.tell(self._task)
        if self._stop.due is StopCause.TIME:
            raise _TimeUpError


@contextmanager
def progress(what: str, total: int, stop: StopCondition) -> Iterator[Bar]:
    """Show a bar while `total` rows are written."""
    with bar_of(what, TextColumn("{task.fields[speed]}")) as bar:
        yield Bar(bar, total, stop)


@contextmanager
def stoppable(journal: Journal) -> Iterator[None]:
    """Say what is safe when the user stops, the time is up, or the device is gone."""
    from moaspec.train.run_failures import explain_failures

    try:
        with explain_failures("while decoding", lambda: f"{journal.rows} rows before are intact."):
            yield
    except (KeyboardInterrupt, _TimeUpError) as reason:
        console.err.print(
            f"Stopped. {journal.rows} rows are in {journal.path}; run the same command again to "
            "continue.",
            style="yellow",
        )
        if isinstance(reason, KeyboardInterrupt):
            raise
        raise typer.Exit(EXIT_UNFINISHED) from reason
