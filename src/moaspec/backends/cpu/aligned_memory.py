"""Memory for weights, in large pages where the system has them."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor


def large_pages(num_bytes: int) -> Tensor:
    """Memory in pages of 2 MiB where the system has them: a pass looks up fewer addresses."""
    # Private, because most systems give shared memory no large pages.
    room = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):
        room.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(room, dtype=torch.uint8)
