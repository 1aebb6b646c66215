"""Threads that prepare requests: some tokenise prompts, others compile grammars.

Each client has at most one request in preparation, and none after it has disconnected.
"""

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from typing import TypeVar

from fastapi import Request

from moaspec_core.errors import BusyError
from moaspec_core.support import limits
from moaspec_serve.openai.event_stream import unless_disconnected
from moaspec_serve.sources.source import RecentMean

T = TypeVar("T")

NICER = 5
"""Beyond the process's niceness, of the threads: beside one of its own they have a quarter of a
core."""


class PreparationPool:
    """A thread pool that all requests share, with a queue per client.

    Args:
        max_waiting: requests of one client that may wait; a source takes as many texts.
        threads: requests that are prepared at the same time.
    """

    def __init__(
        self,
        max_waiting: int = limits.MAX_PREPARING_WAITING,
        threads: int = limits.MAX_PREPARING,
    ) -> None:
        self._max_waiting = max(max_waiting, limits.MAX_PREPARING_WAITING)
        self._pool = ThreadPoolExecutor(
            threads, thread_name_prefix="prepare", initializer=_leave_cores_to_steps
        )
        self._num_threads, self._threads = threads, asyncio.Semaphore(threads)
        self._mean_s = RecentMean()  # of a request's preparation
        self._waiting: Counter[str] = Counter()
        self._locks: dict[str, asyncio.Lock] = {}

    async def run(self, request: Request, work: Callable[[], T]) -> T:
        """Run `work` in a thread; BusyError if too many wait, RequestError if the client left."""
        return await unless_disconnected(request.receive, self.in_turn(client_of(request), work))

    async def in_turn(self, client: str, work: Callable[[], T]) -> T:
        """Wait for this client's turn and for a thread, then run `work`.

        A thread cannot be stopped. If the caller is cancelled while `work` runs, the thread and the
        client's turn stay occupied until it ends.

        Raises:
            BusyError: the client has too many requests waiting.
        """
        if self._waiting[client] >= self._max_waiting:
            retry_s = self._wait_s()
            raise BusyError(
                f"This client has {self._max_waiting} requests whose prompts are not read or "
                "whose grammars are not compiled yet, as many as may wait (--max-active and "
                f"--max-waiting together, or {limits.MAX_PREPARING_WAITING} where these are "
                f"fewer). Try again in {ceil(retry_s)} s.",
                retry_s,
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

    def _wait_s(self) -> float:
        """Seconds until a client's next request is probably prepared: clients take turns."""
        return max(1.0, self._mean_s.value * ceil(len(self._waiting) / self._num_threads))

    async def _work(self, client: str, work: Callable[[], T], begun: asyncio.Event) -> T:
        self._waiting[client] += 1
        try:
            async with self._locks.setdefault(client, asyncio.Lock()), self._threads:
                begun.set()
                started_s = time.monotonic()
                found = await asyncio.get_running_loop().run_in_executor(self._pool, work)
                self._mean_s.add(time.monotonic() - started_s)
                return found
        finally:
            self._waiting[client] -= 1
            if not self._waiting[client]:
                del self._waiting[client]
                self._locks.pop(client, None)


def _leave_cores_to_steps() -> None:
    """Lower this thread's priority: requests that are sent and left again would slow down texts."""
    if sys.platform == "linux":  # elsewhere threads have no priority of their own
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, 0) + NICER)


def client_of(request: Request) -> str:
    """The client of a request: its key, or its address if there are not several keys."""
    address = request.client.host if request.client is not None else ""
    return str(request.state.client) or address
