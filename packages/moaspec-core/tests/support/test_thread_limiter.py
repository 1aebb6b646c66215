"""CPU threads of passes beside other processes."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bits import threads as torch_threads
from moaspec.target import thread_limiter
from moaspec.target.thread_limiter import OUTDATED_S, PERIOD_S, CpuTimes, ThreadLimiter


class Machine:
    """A machine whose clocks a test turns.

    Attributes:
        cores: how many there are.
        others: how many of them other processes keep busy.
        own: how many this process keeps busy.
    """

    def __init__(self, cores: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cores, self.others, self.own = cores, 0.0, 0.0
        self.times = CpuTimes(at_s=0.0, busy_s=0.0, own_s=0.0, cores=cores)
        clock = SimpleNamespace(monotonic=lambda: self.times.at_s)
        monkeypatch.setattr(thread_limiter, "time", clock)

    def read(self) -> CpuTimes:
        return self.times

    def wait(self, seconds: float) -> None:
        before = self.times
        self.times = CpuTimes(
            at_s=before.at_s + seconds,
            busy_s=before.busy_s + seconds * (self.others + self.own),
            own_s=before.own_s + seconds * self.own,
            cores=self.cores,
        )


def inside(limiter: ThreadLimiter) -> int:
    with limiter.limited():
        return torch.get_num_threads()


def test_threads_follow_the_cores_that_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(4.0, monkeypatch)
    limiter = ThreadLimiter(machine.read)
    with torch_threads(4):
        seen = []
        for others, own in ((0.0, 4.0), (1.0, 3.0), (0.2, 3.0), (2.0, 2.0), (4.0, 0.5), (0.0, 1.0)):
            machine.others, machine.own = others, own
            machine.wait(PERIOD_S)
            seen.append(inside(limiter))
            assert limiter.crowded == (seen[-1] < 4)
            assert torch.get_num_threads() == 4
        assert seen == [4, 3, 4, 2, 1, 4]


def test_between_two_readings_the_number_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(2.0, monkeypatch)
    limiter = ThreadLimiter(machine.read)
    with torch_threads(2):
        machine.others = 1.0
        machine.wait(PERIOD_S)
        assert inside(limiter) == 1
        machine.others = 0.0
        machine.wait(PERIOD_S / 2)
        assert inside(limiter) == 1
        machine.wait(PERIOD_S)
        assert inside(limiter) == 2


def test_what_ran_long_ago_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(2.0, monkeypatch)
    limiter = ThreadLimiter(machine.read)
    machine.others = 2.0
    machine.wait(OUTDATED_S + 1.0)
    with torch_threads(2):
        assert inside(limiter) == 2


def test_a_quota_is_a_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Machine(1.5, monkeypatch)
    with torch_threads(2):
        assert inside(ThreadLimiter(machine.read)) == 1
    for text, cores in (("150000 100000", 1.5), ("max 100000", float("inf")), ("", float("inf"))):
        (tmp_path / "cpu.max").write_text(text)
        monkeypatch.setattr(thread_limiter, "CGROUP", tmp_path / "cpu.max")
        assert thread_limiter._quota() == cores


def test_the_clocks_of_this_machine() -> None:
    before = CpuTimes.now()
    until = time.monotonic() + 0.05
    while time.monotonic() < until:
        pass
    after = CpuTimes.now()
    assert after.own_s > before.own_s
    assert after.at_s > before.at_s
    assert after.busy_s >= before.busy_s
    assert after.cores > 0.0
    assert after.free_cores(before) <= after.cores
