"""Limits of time, and the end of tasks."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from moaspec_core.errors import LinkError
from moaspec_core.support.tasks import LoopTurns, end_tasks, time_limit


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


def test_many_tasks_that_are_ready_let_others_go_on() -> None:
    """Another task has its turns while 64 go on, and at most four of these between two of its."""
    done: list[int] = []
    seen: list[int] = []

    async def one(turns: LoopTurns, number: int) -> None:
        await turns.wait()
        done.append(number)

    async def run() -> None:
        turns = LoopTurns(4)
        tasks = [asyncio.create_task(one(turns, number)) for number in range(64)]
        while len(done) < 64:
            seen.append(len(done))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert done == [*range(64)]
    assert max(after - before for before, after in pairwise(seen)) <= 4
