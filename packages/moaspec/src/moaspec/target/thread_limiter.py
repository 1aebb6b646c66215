"""CPU threads of passes: as many as the cores that other processes leave free.

The threads of a pass wait for one another many times. On two cores with one busy process, two
threads decode at a quarter to a third of their idle speed, one thread at more than half of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

PERIOD_S = 0.25  # seconds between two readings; the kernel counts in hundredths of a second
OUTDATED_S = 20.0
"""Age from which a reading does not tell what runs now; the next one follows after SHORT_S."""
SHORT_S = 0.05
SLACK = 0.25  # cores that other processes may use before a thread is given up
CGROUP = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class CpuTimes:
    """Clocks of the cores that this process may run on."""

    at_s: float  # wall clock
    busy_s: float  # time that these cores spent on any process, summed over cores
    own_s: float  # CPU time of this process
    cores: float  # how many of them this process may keep busy, by affinity and quota

    @classmethod
    def now(cls) -> CpuTimes:
        allowed = _allowed()
        times = [one for i, one in enumerate(psutil.cpu_times(percpu=True)) if i in allowed]
        return cls(
            at_s=time.monotonic(),
            busy_s=sum(map(_busy_s, times)),
            own_s=time.process_time(),
            cores=min(float(len(allowed)), _quota()),
        )

    def free_cores(self, since: CpuTimes) -> float:
        """Cores that other processes have left to this one since an earlier reading."""
        others_s = (self.busy_s - since.busy_s) - (self.own_s - since.own_s)
        return self.cores - max(0.0, others_s / (self.at_s - since.at_s))


class ThreadLimiter:
    """Lowers PyTorch's number of threads while other processes need the cores."""

    def __init__(self, read: Callable[[], CpuTimes] = CpuTimes.now) -> None:
        self._read = read
        self._last = read()
        self._due_s = self._last.at_s + SHORT_S
        self._limit = max(1, int(self._last.cores))

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Lower the number for the calling thread inside the block."""
        most = torch.get_num_threads()
        threads = min(most, self.limit) if most > 1 else most
        if threads == most:
            yield
            return
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(most)

    @property
    def crowded(self) -> bool:
        """Whether other processes use cores that PyTorch's threads need."""
        return self.limit < torch.get_num_threads()

    @property
    def limit(self) -> int:
        """The most threads that now have a core each."""
        if time.monotonic() >= self._due_s:
            times, last = self._read(), self._last
            recent = times.at_s - last.at_s < OUTDATED_S
            cores = times.free_cores(last) if recent else times.cores
            self._limit = max(1, int(cores + SLACK))
            self._last = times
            self._due_s = times.at_s + (PERIOD_S if recent else SHORT_S)
        return self._limit


def _allowed() -> set[int]:
    """Numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _quota() -> float:
    """Cores that a container's quota allows."""
    try:
        quota, period = CGROUP.read_text(encoding="ascii").split()
        return max(1.0, int(quota) / int(period))
    except (OSError, ValueError):  # no quota, or not Linux
        return float("inf")


def _busy_s(times: Any) -> float:
    """A core's time without idling; that of virtual machines is part of their users' time."""
    names = ("idle", "iowait", "guest", "guest_nice")
    return float(sum(times) - sum(getattr(times, name, 0.0) for name in names))
