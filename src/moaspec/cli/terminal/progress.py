"""How far long work is, and how long it still takes on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
)
from rich.text import Text

from moaspec.cli.terminal import console
from moaspec.cli.terminal.safe_console import Screen

BAR = 8
"""Columns of a bar, so that a line fits 80."""
LONG_S = 10.0
"""Remaining time from which it is also told where no bar is shown."""


def bar_of(
    name: str, *more: ProgressColumn, screen: Screen | None = None, transient: bool = False
) -> LongProgress:
    """A bar with units and remaining time.

    Args:
        name: stands before it.
        *more: columns between units and time.
        screen: shows it; by default standard error.
        transient: whether it goes when all is done.
    """
    columns = (TextColumn(name), BarColumn(BAR), MofNCompleteColumn(), *more, TimeLeft())
    return LongProgress(*columns, console=screen or console.err, transient=transient)


class TimeLeft(ProgressColumn):
    """The remaining time by the pace of the units of this run, known from the first one on.

    rich's own column needs two units within half a minute. A task that goes on from an earlier run
    has a field `before`, the units of that run.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[TaskID, tuple[float, float]] = {}

    def render(self, task: Task) -> Text:
        """The column's text, see `ProgressColumn`."""
        left_s = self.left_s(task)
        if task.finished:
            return Text()
        return Text("time unknown" if left_s is None else f"{duration(left_s)} left")

    def left_s(self, task: Task) -> float | None:
        """Seconds; None before the first unit is done."""
        done, elapsed = task.completed - task.fields.get("before", 0), task.elapsed
        if done <= 0 or elapsed is None or task.total is None:
            return None
        if self._last.get(task.id, (0.0, 0.0))[0] != done:
            self._last[task.id] = done, elapsed
        _, then = self._last[task.id]
        return max(0.0, then / done * (task.total - task.completed) - (elapsed - then))


class LongProgress(Progress):
    """Where no bar can be drawn, a line says how long the rest takes once a unit is done."""

    told = False

    def stop(self) -> None:
        """End without the empty line that `Progress` leaves where it drew no bar."""
        self.live.stop()

    def tell(self, task_id: TaskID) -> None:
        """To be called after each unit."""
        if self.told or self.console.is_terminal:
            return
        task = self._tasks[task_id]
        left_s = TimeLeft().left_s(task)
        self.told = left_s is not None
        if left_s is not None and left_s >= LONG_S:
            self.console.print(
                f"{task.completed:.0f} of {task.total:.0f} done, about {duration(left_s)} left."
            )


def duration(seconds: float) -> str:
    """A rough time: seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


@contextmanager
def bar(name: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar; what is yielded moves it by one."""
    with bar_of(name, transient=True) as shown:
        task = shown.add_task("", total=total)

        def advance() -> None:
            shown.advance(task)
            shown.tell(task)

        yield advance


@contextmanager
def named_units() -> Iterator[Callable[[str, int], None]]:
    """A bar for units with names; what is yielded is told the next name, and how many there are."""
    with bar_of("{task.description}", transient=True) as shown:
        task = shown.add_task("", total=None)
        begun = iter(range(10**9))

        def begin(name: str, total: int) -> None:
            shown.update(task, description=name, total=total, completed=next(begun))
            shown.tell(task)

        yield begin
