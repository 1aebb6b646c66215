"""How long long work still takes, on a terminal and elsewhere."""

from __future__ import annotations

import io
import os
import pty
import re

import pytest

from moaspec_core.cli.terminal.console import Screen
from moaspec_core.cli.terminal.progress_bar import ProgressBar, duration


class Clock:
    """A clock that tests set."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pipe() -> Screen:
    return Screen(file=io.StringIO(), force_terminal=False, soft_wrap=True)


def lines(screen: Screen) -> list[str]:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue().splitlines()


def test_without_a_terminal_a_line_is_printed_now_and_then(clock: Clock, pipe: Screen) -> None:
    """The first unit tells how long the rest takes; those of an earlier run tell nothing."""
    with ProgressBar("step", 6, screen=pipe, clock=clock) as shown:
        shown.resume(1)
        for step in range(2, 7):
            clock.now_s = (step - 1) * 20.0
            shown.update(completed=step, text=f"loss {step}")
    assert lines(pipe) == ["step 3/6 loss 3 60 s left", "step 5/6 loss 5 20 s left"]


def test_the_rest_does_not_grow_while_a_long_unit_is_under_way(clock: Clock, pipe: Screen) -> None:
    """Rows come in groups of 64: between two of them only the text of the line changes."""
    shown = ProgressBar("prompts", 3, screen=pipe, clock=clock)
    for clock.now_s, done in ((40.0, 0), (100.0, 1), (140.0, 1)):
        shown.update(completed=done)
    assert lines(pipe) == ["prompts 0/3 time unknown", *["prompts 1/3 3 min left"] * 2]


def test_what_is_known_of_the_rest_takes_the_place_of_the_pace(clock: Clock, pipe: Screen) -> None:
    shown = ProgressBar("checking", 90, screen=pipe, clock=clock)
    for clock.now_s, left_s in ((40.0, None), (80.0, 50.0)):
        shown.update(text="trees", left_s=left_s, advance=10)
    assert lines(pipe) == [
        "checking 10/90 trees time unknown",
        "checking 20/90 trees 50 s left",
    ]


def test_what_stays_without_a_terminal_is_one_line(pipe: Screen) -> None:
    """Nothing of a bar that does not stay, not even an empty line."""
    with ProgressBar("measuring", 2, screen=pipe) as bar:
        bar.advance()
    assert lines(pipe) == []
    with ProgressBar("rows", 2, screen=pipe, stays=True) as bar:
        bar.update(completed=2, text="5 tokens/s")
    assert lines(pipe) == ["rows 2/2 5 tokens/s"]


def test_a_bar_on_a_terminal_fits_80_columns_and_obeys_no_text() -> None:
    words = "loss 1.23 kl 0.12 accuracy 55% 1234 tokens/s"
    parent, child = pty.openpty()
    with os.fdopen(parent, "rb", buffering=0) as shown, os.fdopen(child, "w") as file:
        screen = Screen(file=file, width=80, color_system=None, _environ={"TERM": "xterm"})
        with ProgressBar("step", 500, screen=screen, stays=True) as bar:
            bar.resume(100)
            bar.update(text=words)
        with ProgressBar("rows\x1b[2J", 2, screen=screen) as bar:
            bar.advance()
        screen.print("the end")
        text = b""
        while b"the end" not in text:
            text += shown.read(4096)
    assert b"\x1b[2J" not in text
    assert b"rows\\x" in text
    rows = [line for line in re.split(r"\r?\n|\r", text.decode()) if words in line]
    assert "100/500" in rows[-1]
    assert rows[-1].rstrip().endswith("time unknown")


def test_durations_are_rough() -> None:
    assert list(map(duration, (7.4, 99.0, 600.0, 7200.0))) == ["7 s", "99 s", "10 min", "2.0 h"]
