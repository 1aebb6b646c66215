"""Seconds, CPU seconds and peak memory of a piece of work."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""What Linux wants written to `clear_refs` to forget the highest resident size so far."""


@dataclass
class Meter:
    """Measures the block it is entered for.

    Attributes:
        device: whose queue is drained before each look at the clock.
        seconds: wall-clock.
        cpu_s: of all threads of this process.
        peak_bytes: on a GPU the most that torch held there; else the process's highest resident
            size, weights of every loaded model included. None where neither can be told.
    """

    device: torch.device
    seconds: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int | None = None

    def __enter__(self) -> Meter:
        self._resets = _forget_peak(self.device)
        self._cpu, self._started = time.process_time(), self._now()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.seconds = self._now() - self._started
        self.cpu_s = time.process_time() - self._cpu
        self.peak_bytes = _peak(self.device) if self._resets else None

    def elapsed(self) -> float:
        """Seconds since the block was entered."""
        return self._now() - self._started

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _forget_peak(device: torch.device) -> bool:
    """Whether the peak from now on can be told."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def _peak(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) * 1024
    return None
