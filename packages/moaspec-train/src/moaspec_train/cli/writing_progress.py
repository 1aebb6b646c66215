"""Progress bar and stop message of commands that write rows."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.progress_bar import ProgressBar
from moaspec_train.dataset.journal import Journal
from moaspec_train.stopping import EXIT_UNFINISHED, StopCause, StopCondition

if TYPE_CHECKING:
    from moaspec_train.dataset.response_writer import OutputRow


KEEP_EVERY_S = 60.0


class _StopError(Exception):
    """A signal asks to stop, or the time that `--for` gave is over."""


class WritingProgress(ProgressBar):
    """A progress bar of rows with tokens per second; ends the run inside `stoppable`.

    Args:
        seconds: time limit; None for no limit. At least one conversation is finished first, so
            that a run makes progress in any time.
    """

    def __init__(self, name: str, total: int, seconds: float | None) -> None:
        super().__init__(name, total, stays=True)
        self._stop = StopCondition(seconds)
        self._tokens, self._finished, self._started = 0, 0, time.perf_counter()
        self._note = ""
        self._keep: Callable[[], None] = lambda: None
        self._kept_s = time.monotonic()

    def resume(self, done: int) -> None:
        super().resume(done)
        self._started = time.perf_counter()

    def note(self, done: int, note: str) -> None:
        """Set the number of finished units, and a note behind the speed."""
        self._note = note
        self.update(completed=done, text=self._text())

    def _text(self) -> str:
        elapsed = time.perf_counter() - self._started
        speed = f"{self._tokens / max(elapsed, 1e-9):.1f} tokens/s"
        return f"{speed}, {self._note}" if self._note else speed

    def add(self, tokens: int, finished: int, *, done: int | None = None) -> None:
        """Count tokens and conversations (`done`: units in all); raise if the run shall stop."""
        self._tokens += tokens
        self._finished += finished
        completed = self.task.completed + finished if done is None else done
        self.update(completed=completed, text=self._text())
        if time.monotonic() >= self._kept_s + KEEP_EVERY_S:
            self._keep()
            self._kept_s = time.monotonic()
        due = self._stop.due
        if due >= StopCause.INTERRUPTED or (due is StopCause.TIME and self._finished):
            raise _StopError

    @contextmanager
    def stoppable(
        self, journal: Journal, finished: Callable[[], Mapping[int, list[OutputRow]]]
    ) -> Iterator[None]:
        """Keep finished conversations when the run ends early, and say which rows are saved.

        They are also kept once a minute, for a run that is killed.

        The first Ctrl-C or SIGTERM and the end of the time let `add` raise.

        Args:
            finished: the finished conversations of groups under way, by number.
        """
        from moaspec_train.run_failures import explain_failures

        self._keep = lambda: journal.keep(finished())
        try:
            with (
                self._stop.on_signals(),
                explain_failures(
                    "while decoding", lambda: f"{journal.rows} rows before are intact."
                ),
            ):
                yield
        except BaseException as reason:
            kept = finished()
            journal.keep(kept)
            if not isinstance(reason, KeyboardInterrupt | _StopError):
                raise
            more = f", {len(kept)} conversations of the next groups beside it" if kept else ""
            console.warn(
                f"Stopped. {journal.rows} rows are in {journal.path}{more}; run the same command "
                "again to continue."
            )
            number = signal.SIGINT if isinstance(reason, KeyboardInterrupt) else self._stop.signal
            raise typer.Exit(EXIT_UNFINISHED if number is None else 128 + number) from reason
