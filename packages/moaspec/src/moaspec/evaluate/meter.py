"""Measure wall-clock time, CPU time and peak memory of a block."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # written to `clear_refs`, resets the peak resident size on Linux


@dataclass
class Meter:
    """A context manager that measures its block."""

    device: torch.device  # synchronised before each reading of the clock
    seconds: float = 0.0
    cpu_s: float = 0.0  # CPU time of all threads of this process
    # On a GPU, peak memory of torch; else the peak resident size of the process, with the weights
    # of every loaded model. None if the system cannot report it.
    peak_bytes: int | None = None

    def __enter__(self) -> Meter:
        self._resets = _reset_peak(self.device)
        self._cpu, self._started = time.process_time(), self._now()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = self._now() - self._started
        self.cpu_s = time.process_time() - self._cpu
        self.peak_bytes = _peak(self.device) if self._resets else None

    def elapsed(self) -> float:
        return self._now() - self._started

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _reset_peak(device: torch.device) -> bool:
    """Reset the peak; return whether that is possible."""
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
