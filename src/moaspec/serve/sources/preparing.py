"""Work of a request before it is decoded: tokenising its prompt, compiling its grammar.

It runs in few threads, for every client one piece at a time, and not at all once its client left.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fastapi import Request

from moaspec.errors import BusyError
from moaspec.serve.http_errors import RequestError
from moaspec.serve.openai.request_texts import CLIENT_LEFT, end_tasks, left
from moaspec.support import limits

T = TypeVar("T")


class Preparation:
    """Threads that all requests share, bounded in number and per client."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(limits.MAX_PREPARING, thread_name_prefix="prepare")
        self._room = asyncio.Semaphore(limits.MAX_PREPARING)
        self._waiting: Counter[str] = Counter()
        self._turns: dict[str, asyncio.Lock] = {}

    async def run(self, request: Request, work: Callable[[], T]) -> T:
        """The result of `work`, which runs in a thread.

        Raises:
            BusyError: this client has too much work waiting.
            RequestError: the client left first.
        """
        working = asyncio.create_task(self.in_turn(client_of(request), work))
        leaving = asyncio.create_task(left(request.receive))
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise RequestError("The client left.", status=CLIENT_LEFT)
            return working.result()
        finally:
            await end_tasks(working, leaving)

    async def in_turn(self, client: str, work: Callable[[], T]) -> T:
        """Wait for this client's turn and for a thread, then work.

        A thread cannot be stopped: where the caller is cancelled while it works, the client's turn
        and the thread stay taken until the work ends.

        Raises:
            BusyError: this client has too much work waiting.
        """
        if self._waiting[client] >= limits.MAX_PREPARING_WAITING:
            raise BusyError(
                f"This client has {limits.MAX_PREPARING_WAITING} requests whose prompts are not "
                "read yet. Try again later."
            )
        begun = asyncio.Event()
        task = asyncio.create_task(self._work(client, work, begun))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            if not begun.is_set():
                task.cancel()
            raise

    async def _work(self, client: str, work: Callable[[], T], begun: asyncio.Event) -> T:
        self._waiting[client] += 1
        try:
            async with self._turns.setdefault(client, asyncio.Lock()), self._room:
                begun.set()
                return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._waiting[client] -= 1
            if not self._waiting[client]:
                del self._waiting[client]
                self._turns.pop(client, None)


def client_of(request: Request) -> str:
    """Whose a request is: that of a key, or of an address where there are not several keys."""
    address = request.client.host if request.client is not None else ""
    return str(request.state.client) or address
