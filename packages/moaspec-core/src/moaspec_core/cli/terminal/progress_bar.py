"""A progress bar with the remaining time."""

from collections.abc import Callable
from typing import Self

from rich.console import RenderableType
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
from moaspec_core.cli.terminal.console import Screen

BAR_COLUMNS = 8  # a whole line then fits 80 columns
PERIOD_S = 30.0  # where no bar can be drawn, seconds between the lines that take its place


class TimeLeft(ProgressColumn):
    """The remaining time of one task by the pace of this run's units, from the first one on.

    rich's own column needs two units within half a minute. A task that continues an earlier run
    has a field `before`, the units of that run. One whose units take unlike times has a field
    `known`: what is known of the remaining seconds, and the time at which it was.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last = (0.0, 0.0)  # units done, and seconds when the last of them was

    def render(self, task: Task) -> Text:
        left_s = self.left_s(task)
        if task.finished:
            return Text()
        return Text("time unknown" if left_s is None else f"{duration(left_s)} left")

    def left_s(self, task: Task) -> float | None:
        """Seconds; None before the first unit is done, or while `known` has none."""
        done, elapsed = task.completed - task.fields.get("before", 0), task.elapsed
        if "known" in task.fields and elapsed is not None:
            left_s, then = task.fields["known"]
            return None if left_s is None else max(0.0, left_s - (elapsed - then))
        if done <= 0 or elapsed is None or task.total is None:
            return None
        if self._last[0] != done:
            self._last = done, elapsed
        _, then = self._last
        return max(0.0, then / done * (task.total - task.completed) - (elapsed - then))


class ProgressBar:
    """A bar of finished units with the remaining time, as a context manager.

    Where no bar can be drawn, a line is printed now and then. `total` is None until `begin` gives
    it; `screen` is standard error by default.
    """

    def __init__(
        self,
        name: str,
        total: int | None = None,
        *,
        screen: Screen | None = None,
        transient: bool = True,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._left = TimeLeft()
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(BAR_COLUMNS),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            self._left,
        )
        self.screen = screen or console.err
        self._stays = not transient
        self._progress = Progress(
            *columns,
            console=self.screen,
            transient=transient or not self.screen.is_terminal,
            get_time=clock,
        )
        self._id = self._progress.add_task(name, total=total, before=0, text="")
        self._begun, self._told_s = 0, self._progress.get_time()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.live.stop()  # `Progress.stop` prints an empty line where it drew no bar
        if self._stays and not self.screen.is_terminal:
            task = self.task
            done = f"{task.description} {task.completed:.0f}/{task.total:.0f}"
            self.screen.print(f"{done} {task.fields['text']}".rstrip())

    @property
    def renderable(self) -> RenderableType:
        return self._progress.get_renderable()

    @property
    def task(self) -> Task:
        return self._progress.tasks[0]

    def resume(self, done: int) -> None:
        """Begin after the units of an earlier run."""
        self._progress.reset(self._id, completed=done, before=done, text="")

    def begin(self, name: str, total: int) -> None:
        """Begin the next unit, which has this name."""
        self._progress.update(self._id, description=name, total=total, completed=self._begun)
        self._begun += 1
        self._print_line()

    def advance(self, units: int = 1) -> None:
        self.update(int(self.task.completed) + units)

    def update(self, done: int, text: str | None = None) -> None:
        """Set the number of finished units, and the text behind it."""
        text = self.task.fields["text"] if text is None else text
        self._progress.update(self._id, completed=done, text=text)
        self._print_line()

    def tell(self, doing: str, left_s: float | None) -> None:
        """Show what is being done, and the remaining seconds in place of those by pace."""
        known = (left_s, self.task.elapsed or 0.0)
        self._progress.update(self._id, text=doing, known=known)
        self._print_line()

    def _print_line(self) -> None:
        """Print the bar as a line where none is drawn, if `PERIOD_S` have passed since the last."""
        left = self._left.render(self.task).plain  # notes when this number of units was reached
        now_s, task = self._progress.get_time(), self.task
        if self.screen.is_terminal or now_s - self._told_s < PERIOD_S:
            return
        self._told_s = now_s
        parts = (f"{task.completed:.0f}/{task.total:.0f}", task.fields["text"], left)
        self.screen.print(" ".join((task.description, *filter(None, parts))))


def duration(seconds: float) -> str:
    """A rough time: seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
