"""The meter: seconds, CPU seconds, peak memory."""

from __future__ import annotations

from mmap import mmap
from pathlib import Path

import pytest
import torch

from moaspec.evaluate import meter
from moaspec.evaluate.meter import Meter

MEGABYTE = 2**20


def test_a_block_is_measured() -> None:
    with Meter(torch.device("cpu")) as measured:
        halfway = measured.elapsed()
        sum(range(100_000))
    assert 0 <= halfway < measured.seconds
    assert measured.cpu_s > 0


def test_the_peak_is_that_of_the_block() -> None:
    """Memory that was taken and given back before it does not count.

    Mapped, because an allocator may keep what is freed.
    """
    with Meter(torch.device("cpu")) as large, mmap(-1, 256 * MEGABYTE) as pages:
        pages.write(b"1" * (256 * MEGABYTE))
    if large.peak_bytes is None:
        pytest.skip("this system does not tell the peak of a process")
    with Meter(torch.device("cpu")) as small:
        pass
    assert small.peak_bytes is not None
    assert large.peak_bytes - small.peak_bytes > 200 * MEGABYTE


def test_where_peaks_cannot_be_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(meter, "_CLEAR", tmp_path / "nowhere" / "clear_refs")
    with Meter(torch.device("cpu")) as measured:
        pass
    assert measured.peak_bytes is None
