"""Progress bar and stop message of commands that write rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from moaspec.cli.terminal import console
from moaspec.cli.terminal.interrupts import TERMINATED, TerminatedError, raise_on_sigterm
from moaspec.cli.terminal.progress_bar import PERIOD_S, ProgressBar
from moaspec.train.dataset.journal import Journal
from moaspec.train.stopping import EXIT_UNFINISHED, StopCause, StopCondition

if TYPE_CHECKING:
    from moaspec.train.dataset.response_writer import OutputRow


class _TimeUpError(Exception):
    """The time that `--for` gave is over."""


class WritingProgress(ProgressBar):
    """A progress bar of rows with tokens per second; ends the run when its time is up.

    At least one conversation is finished first, so that a run makes progress in any time.
    """

    def __init__(self, name: str, total: int, stop: StopCondition) -> None:
        super().__init__(name, total, transient=False, period_s=PERIOD_S)
        self._stop = stop
        self._tokens, self._finished, self._started = 0, 0, time.perf_counter()
        self._note = ""

    def resume(self, done: int) -> None:
        """Begin after the rows of an earlier run."""
        super().resume(done)
        self._started = time.perf_counter()

    def note(self, done: int, note: str) -> None:
        """Set the number of finished units, and a note behind the speed."""
        self._note = note
        self.update(done, self._text())

    def _text(self) -> str:
        elapsed = time.perf_counter() - self._started
        speed = f"{self._tokens / max(elapsed, 1e-9):.1f} tokens/s"
        return f"{speed}, {self._note}" if self._note else speed

    def add(self, tokens: int, finished: int, *, rows: int | None = None) -> None:
        """Count tokens and finished conversations of one engine step.

        Args:
            tokens: new ones.
            finished: conversations.
            rows: units of the bar that they are; None: each is one.
        """
        self._tokens += tokens
        self._finished += finished
        done = int(self.task.completed) + (finished if rows is None else rows)
        self.update(done, self._text())
        if self._finished and self._stop.due is StopCause.TIME:
            raise _TimeUpError


@contextmanager
def stoppable(
    journal: Journal, finished: Callable[[], Mapping[int, list[OutputRow]]] = dict
) -> Iterator[None]:
    """Print which rows are saved when the user stops, the time is up, or the device is lost.

    Args:
        journal: of the rows.
        finished: the finished conversations of the group under way, which are kept.
    """
    from moaspec.train.run_failures import explain_failures

    try:
        with (
            raise_on_sigterm(),
            explain_failures("while decoding", lambda: f"{journal.rows} rows before are intact."),
        ):
            yield
    except (KeyboardInterrupt, TerminatedError, _TimeUpError) as reason:
        kept = dict(finished())
        journal.keep(kept)
        more = f", {len(kept)} conversations of the next group beside it" if kept else ""
        console.warn(
            f"Stopped. {journal.rows} rows are in {journal.path}{more}; run the same command "
            "again to continue."
        )
        if isinstance(reason, KeyboardInterrupt):
            raise
        terminated = isinstance(reason, TerminatedError)
        raise typer.Exit(TERMINATED if terminated else EXIT_UNFINISHED) from reason
