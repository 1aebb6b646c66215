"""Waiting in an event loop: limits of time, and the end of tasks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from moaspec.errors import LinkError


@asynccontextmanager
async def time_limit(
    seconds: float, message: str, kind: type[LinkError] = LinkError
) -> AsyncIterator[None]:
    """Limit a wait; an error of this kind, with this message, where it takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise kind(message) from error


async def end_tasks(*tasks: asyncio.Task[Any]) -> list[Any]:
    """Cancel tasks and wait until they have ended; their results and errors."""
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)
