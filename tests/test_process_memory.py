"""Garbage of a server that waits is collected, and what was loaded is left alone."""

from __future__ import annotations

import asyncio
import gc
import weakref

from moaspec.process_memory import freeze_loaded_objects, return_memory_forever


class Cycle:
    """Only a garbage collection frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_while_nothing_happens() -> None:
    async def run() -> None:
        gc.disable()
        left = weakref.ref(Cycle())
        returning = asyncio.create_task(return_memory_forever(0.01))
        try:
            async with asyncio.timeout(60):
                while left() is not None:
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()
            returning.cancel()

    asyncio.run(run())


def test_loaded_objects_are_exempt() -> None:
    loaded = Cycle()
    freeze_loaded_objects()
    try:
        assert gc.get_freeze_count() > 0
        assert not any(one is loaded for one in gc.get_objects())
    finally:
        gc.unfreeze()
