"""How long long work still takes."""

from __future__ import annotations

import io

import pytest
from rich.progress import Progress

from moaspec_core.cli.terminal.console import Screen
from moaspec_core.cli.terminal.progress_bar import ProgressBar, TimeLeft, duration


class Clock:
    """A clock that tests set."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_first_unit_tells_how_long_the_rest_takes(clock: Clock) -> None:
    left, shown = TimeLeft(), Progress(get_time=clock, console=Screen(file=io.StringIO()))
    shown.add_task("", total=10, completed=4, before=4)
    (task,) = shown.tasks
    assert left.render(task).plain == "time unknown"
    clock.now_s = 60.0
    shown.advance(task.id)
    assert left.render(task).plain == "5 min left"
    clock.now_s = 90.0  # half of the next one; the pace is still that of the first
    assert left.left_s(task) == pytest.approx(5 * 60 - 30)
    clock.now_s = 1e6
    assert left.left_s(task) == 0
    shown.update(task.id, completed=10)
    assert left.render(task).plain == ""


def test_without_a_terminal_a_line_is_printed_now_and_then(clock: Clock) -> None:
    file = io.StringIO()
    screen = Screen(file=file, force_terminal=False, soft_wrap=True)
    shown = ProgressBar("step", 6, screen=screen, clock=clock)
    shown.resume(1)
    for step in range(2, 7):
        clock.now_s = (step - 1) * 20.0
        shown.update(step, f"loss {step}")
    assert file.getvalue().splitlines() == [
        "step 3/6 loss 3 60 s left",
        "step 5/6 loss 5 20 s left",
    ]


def test_the_rest_does_not_grow_while_a_long_unit_is_under_way(clock: Clock) -> None:
    """Rows come in groups of 64: between two of them only the text of the line changes."""
    file = io.StringIO()
    screen = Screen(file=file, force_terminal=False, soft_wrap=True)
    shown = ProgressBar("prompts", 3, screen=screen, clock=clock)
    for now_s, done in ((100.0, 1), (140.0, 1), (180.0, 1)):
        clock.now_s = now_s
        shown.update(done)
    assert [line[len("prompts 1/3 ") :] for line in file.getvalue().splitlines()] == [
        "3 min left",
        "3 min left",
        "2 min left",
    ]


def test_what_is_known_of_the_rest_takes_the_place_of_the_pace(clock: Clock) -> None:
    file = io.StringIO()
    screen = Screen(file=file, force_terminal=False, soft_wrap=True)
    shown = ProgressBar("checking", 90, screen=screen, clock=clock)
    for now_s, left_s in ((40.0, None), (80.0, 50.0)):
        clock.now_s = now_s
        shown.tell("trees", left_s)
        shown.update(10)
    clock.now_s = 120.0
    shown.update(20)
    assert file.getvalue().splitlines() == [
        "checking 0/90 trees time unknown",
        "checking 10/90 trees 50 s left",
        "checking 20/90 trees 10 s left",
    ]


def test_units_are_counted() -> None:
    def state(bar: ProgressBar) -> tuple[float, float | None, str]:
        return bar.task.completed, bar.task.total, bar.task.description

    with ProgressBar("checking", 3) as bar:
        bar.advance()
        assert state(bar) == (1, 3, "checking")
        bar.resume(1)
        bar.advance(2)
        assert state(bar) == (3, 3, "checking")
    with ProgressBar("") as bar:
        bar.begin("lan: plain", 3)
        assert state(bar) == (0, 3, "lan: plain")
        bar.begin("lan: ahead", 3)
        assert state(bar) == (1, 3, "lan: ahead")


def test_durations_are_rough() -> None:
    assert list(map(duration, (7.4, 99.0, 600.0, 7200.0))) == ["7 s", "99 s", "10 min", "2.0 h"]


def test_a_bar_with_long_words_fits_80_columns() -> None:
    file = io.StringIO()
    screen = Screen(file=file, width=80)
    shown = ProgressBar("step", 500, screen=screen)
    words = "loss 1.23 kl 0.12 accuracy 55% 1234 tokens/s"
    shown.resume(100)
    shown.update(100, words)
    screen.print(shown.renderable)
    (line,) = file.getvalue().splitlines()
    assert words in line
    assert "100/500" in line
    assert line.rstrip().endswith("time unknown")
