"""How far long work is: rich's progress bar on a terminal, elsewhere a line now and then."""

from collections.abc import Callable
from typing import Any, Self

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
)
from rich.text import Text

from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.console import Screen, is_live

BAR_COLUMNS = 8  # a whole line then fits 80 columns
PERIOD_S = 30.0  # between two lines where no bar can be drawn


class TimeLeft(ProgressColumn):
    """The remaining time, by a task's field `left_s` or else by its pace."""

    def render(self, task: Task) -> Text:
        if task.finished:
            return Text()
        left_s = task.fields.get("left_s", task.time_remaining)
        return Text("time unknown" if left_s is None else f"{duration(left_s)} left")


class ProgressBar:
    """One task of rich's `Progress` on `screen`, by default standard error.

    Args:
        total: None until `update` sets it.
        stays: whether the last state remains on the screen.
    """

    def __init__(
        self,
        name: str,
        total: int | None = None,
        *,
        screen: Screen | None = None,
        stays: bool = False,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.screen = screen or console.err
        self._live, self._stays = is_live(self.screen), stays
        self._texts = (
            TextColumn("{task.description}", markup=False),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            TimeLeft(),
        )
        name_column, *others = self._texts
        self._progress = Progress(
            *(name_column, BarColumn(BAR_COLUMNS), *others),
            console=self.screen,
            transient=not stays,
            disable=not self._live,
            get_time=clock,
            speed_estimate_period=float("inf"),
        )
        self._id = self._progress.add_task(name, total=total, text="")
        self._told_s = self._progress.get_time()
        self.resume(0)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        if self._stays and not self._live:
            self.screen.print(str(self))

    def __str__(self) -> str:
        """The bar as a line of text."""
        parts = (str(column.render(self.task)).strip() for column in self._texts)
        return " ".join(filter(None, parts))

    @property
    def task(self) -> Task:
        return self._progress.tasks[0]

    def resume(self, done: int) -> None:
        """Begin after the units of an earlier run."""
        self._progress.reset(self._id, completed=done)
        self._progress.advance(self._id, 0)  # the pace counts from here: the first unit tells it

    def advance(self, units: int = 1) -> None:
        self.update(advance=units)

    def update(self, **changes: Any) -> None:
        """Change the task as rich's `Progress.update` does; `text` stands behind the numbers."""
        self._progress.update(self._id, **changes)
        now_s = self._progress.get_time()
        if not self._live and now_s - self._told_s >= PERIOD_S:
            self._told_s = now_s
            self.screen.print(str(self))


def duration(seconds: float) -> str:
    """A rough time: seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
