"""Waiting in an event loop: limits of time, turns, the delay of refusals, and the end of tasks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from moaspec_core.errors import LinkError
from moaspec_core.support import limits


@asynccontextmanager
async def time_limit(seconds: float, message: str) -> AsyncIterator[None]:
    """Limit a wait; LinkError with this message where it takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise LinkError(message) from error


async def end_tasks(*tasks: asyncio.Task[Any]) -> list[Any]:
    """Cancel tasks and wait until they have ended; their results and errors."""
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


class LoopTurns:
    """Lets few tasks go on in each turn of the event loop.

    Tasks that become ready together (streams after a step, requests that come at once) would all
    run before any other task does.
    """

    def __init__(self, most: int = 4) -> None:
        self._room = asyncio.Semaphore(most)

    async def wait(self) -> None:
        """Wait for a turn, at least the next one."""
        async with self._room:
            await asyncio.sleep(0)


class RefusalDelay:
    """Delays refusals, which slows down guessing, at most `MAX_WRONG_TOKENS` at a time."""

    def __init__(self) -> None:
        self._waiting = 0

    async def wait(self) -> None:
        """Wait before a wrong token or key is refused; return at once if too many wait."""
        if self._waiting >= limits.MAX_WRONG_TOKENS:
            return
        self._waiting += 1
        try:
            await asyncio.sleep(limits.WRONG_TOKEN_S)
        finally:
            self._waiting -= 1
