"""Limits of time, and the end of tasks."""

from __future__ import annotations

import asyncio

import pytest

from moaspec_core.errors import LinkError
from moaspec_core.support.tasks import end_tasks, time_limit


def test_what_takes_too_long_is_an_error_of_ours() -> None:
    async def run() -> None:
        async with time_limit(60.0, "late"):
            pass
        with pytest.raises(LinkError, match="late"):
            async with time_limit(0.0, "late"):
                await asyncio.Event().wait()

    asyncio.run(run())


def test_ended_tasks_tell_how_they_ended() -> None:
    async def fail() -> None:
        raise ValueError

    async def run() -> None:
        tasks = asyncio.create_task(asyncio.sleep(0, 7)), asyncio.create_task(fail())
        await asyncio.wait(tasks)
        waiting = asyncio.create_task(asyncio.Event().wait())
        done, failed, cancelled = await end_tasks(*tasks, waiting)
        assert done == 7
        assert isinstance(failed, ValueError)
        assert isinstance(cancelled, asyncio.CancelledError)

    asyncio.run(run())
