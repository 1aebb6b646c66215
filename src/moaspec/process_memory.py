"""The memory of a server's process: short garbage collections, and freed memory given back."""

from __future__ import annotations

import asyncio
import gc

from moaspec.backends.pack import return_freed_memory

RETURN_S = 30.0
"""Seconds between two returns of freed memory."""


def freeze_loaded_objects() -> None:
    """Exempt all objects of now from garbage collection; call once, before requests come.

    Modules and models are over a million objects. A full collection looks at each of them, which
    stops all threads for half a second, and so Python runs one rarely: requests that are garbage
    would stay in memory for long.
    """
    gc.collect()
    gc.freeze()


async def return_memory_forever(interval_s: float = RETURN_S) -> None:
    """Collect garbage and return freed memory to the system, again and again.

    glibc keeps what large requests leave in its heaps.
    """
    while True:
        await asyncio.sleep(interval_s)
        gc.collect()
        await asyncio.to_thread(return_freed_memory)
