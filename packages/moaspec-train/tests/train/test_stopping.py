"""Leaving in time."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from moaspec_core.errors import InputError
from moaspec_train.stopping import StopCause, StopCondition, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"), [("8m", 480), ("90s", 90), ("1.5h", 5400), ("45", 45), (" 2m ", 120)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-1m", "0s", "1d", "1m30s", "nan"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(InputError, match="8m"):
        parse_duration(text)


def test_time_is_up() -> None:
    assert StopCondition().due is StopCause.FINISHED
    assert StopCondition(1000).due is StopCause.FINISHED
    over = StopCondition(0.000001)
    time.sleep(0.001)
    assert over.due is StopCause.TIME


@pytest.fixture
def _ctrl_c_counts() -> Iterator[None]:
    """A process that a shell started in the background ignores Ctrl-C."""
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, outside)


@pytest.mark.usefixtures("_ctrl_c_counts")
def test_the_second_signal_acts_at_once() -> None:
    stop = StopCondition()
    before = signal.getsignal(signal.SIGINT)
    with stop.on_signals():
        signal.raise_signal(signal.SIGINT)
        assert stop.due is StopCause.INTERRUPTED
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
