"""Address space that takes memory where it is written, for caches that grow without a copy.

On Linux a private mapping without swap reservation costs nothing until its pages are written, and
gives them back one by one. vAttention (arXiv 2405.04437) does the same on GPUs.
"""

from __future__ import annotations

import mmap
import platform
import sys

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
MAP_NORESERVE = 0x4000
"""Linux's on these machines; Python names it from 3.13 on."""
MACHINES = ("x86_64", "aarch64")

MAX_ADDRESS_SPACE = 1 << 43
"""Bytes of address space of one cache, at most: a process has 2^47."""


class ReservedMemory:
    """Zeros; use `reserve`, which says whether the system has such memory."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping

    @classmethod
    def reserve(cls, unit_bytes: int, most: int) -> tuple[ReservedMemory, int] | None:
        """Address space for up to `most` units, and their number; None where there is none."""
        if sys.platform != "linux" or platform.machine() not in MACHINES:
            return None
        number = min(most, MAX_ADDRESS_SPACE // unit_bytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        while number:
            try:
                mapping = mmap.mmap(-1, number * unit_bytes, flags=flags)
            except OSError:  # `ulimit -v`, or a system that counts address space
                number //= 2
                continue
            # A huge page would commit 2 MiB for the keys of one head of one layer.
            mapping.madvise(mmap.MADV_NOHUGEPAGE)
            return cls(mapping), number
        return None

    def tensor(self, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(self._mapping, dtype=dtype)

    def give_back(self, start: int, stop: int) -> None:
        """Return the memory of the whole pages between two bytes, which read as zeros again."""
        start, stop = -(-start // PAGE) * PAGE, stop // PAGE * PAGE
        if start < stop:
            self._mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)
