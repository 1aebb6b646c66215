"""One target for many rows: what is asked at the same time shares its passes.

Everybody asks for one row at a time and waits. Whatever came while a pass was running is the next
pass, first come first served, so batches form by themselves and nobody starves.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from moaspec.decode.engine import run_now
from moaspec.decode.protocols import Request, Verdict, Verifier


@dataclass(frozen=True, kw_only=True)
class PassOptions:
    """What one pass may hold.

    Attributes:
        max_rows: verifications at most.
        prefill_tokens: tokens of prompts at most; a prompt is read in stretches of this size.
        min_pass_s: passes take at least so long, to hold a server's speed in experiments.
    """

    max_rows: int = 64
    prefill_tokens: int = 128
    min_pass_s: float = 0.0


@dataclass(eq=False)
class _Job:
    request: Request
    answer: asyncio.Future[tuple[Verdict, float]]

    @property
    def prefill(self) -> int:
        """Tokens of text that are read, beyond the newest."""
        return len(self.request.known) - 1


@dataclass
class PassCounts:
    """What passes have done so far."""

    passes: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0


class SharedVerifier:
    """Lends rows of a verifier and batches what is asked of them.

    Args:
        verifier: decides; called in a thread of its own, one pass at a time.
        options: of passes.
        on_idle: done whenever a row comes back and none is lent any more.
    """

    def __init__(
        self,
        verifier: Verifier,
        options: PassOptions | None = None,
        on_idle: Callable[[], None] | None = None,
    ) -> None:
        self._verifier, self.options = verifier, options or PassOptions()
        self._on_idle = on_idle
        self._jobs: deque[_Job] = deque()
        self._used: set[int] = set()
        self._running: set[int] = set()
        self._leaving: set[int] = set()
        self._wake = asyncio.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="target")
        self._task: asyncio.Task[None] | None = None
        self.counts = PassCounts()

    @property
    def num_rows(self) -> int:
        """Rows that are lent."""
        return len(self._used)

    @property
    def num_waiting(self) -> int:
        """Requests that no pass has taken yet."""
        return len(self._jobs)

    def lease(self) -> int:
        """A row of one's own, until `close`. The lowest free one, so that caches stay small."""
        row = next(i for i in range(len(self._used) + 1) if i not in self._used)
        self._used.add(row)
        return row

    def close(self, row: int) -> None:
        """Give a row back; one that a pass is working on becomes free when it is done."""
        self._jobs = deque(job for job in self._jobs if job.request.row != row)
        if row in self._running:
            self._leaving.add(row)
            return
        self._verifier.close(row)
        self._used.discard(row)
        if self._on_idle is not None and not self._used:
            self._on_idle()

    async def verify(self, requests: Sequence[Request]) -> list[Verdict]:
        """See `Verifier`."""
        answers = await asyncio.gather(*(self.decide(request) for request in requests))
        return [verdict for verdict, _ in answers]

    async def decide(self, request: Request) -> tuple[Verdict, float]:
        """One row's verdict, and the seconds of the pass that brought it."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        job = _Job(request, asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        self._wake.set()
        return await job.answer

    async def stop(self) -> None:
        """End after the running pass; what waits is cancelled."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        for job in self._jobs:
            job.answer.cancel()
        self._jobs.clear()
        self._pool.shutdown(wait=True)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while jobs := self._next():
                await self._decide_together(jobs)

    def _next(self) -> list[_Job]:
        """The oldest requests that fit into one pass; at least one, if there are any."""
        jobs: list[_Job] = []
        left: deque[_Job] = deque()
        prefill = 0
        for job in self._jobs:
            fits = prefill + job.prefill <= self.options.prefill_tokens or not job.prefill
            if job.answer.cancelled():
                continue
            if not jobs or (len(jobs) < self.options.max_rows and fits):
                jobs.append(job)
                prefill += job.prefill
            else:
                left.append(job)
        self._jobs = left
        return jobs

    async def _decide_together(self, jobs: list[_Job]) -> None:
        self._running = {job.request.row for job in jobs}
        started = time.monotonic()
        answers: list[Verdict | Exception]
        try:
            answers = await self._pass([job.request for job in jobs])
        except RuntimeError as error:  # the thread is gone; nobody should wait for it
            answers = [error] * len(jobs)
        finally:
            self._free_left_rows()
        seconds = time.monotonic() - started
        if seconds < self.options.min_pass_s:
            await asyncio.sleep(self.options.min_pass_s - seconds)
            seconds = self.options.min_pass_s
        self._count(jobs, seconds)
        for job, answer in zip(jobs, answers, strict=True):
            if job.answer.done():
                continue
            if isinstance(answer, Verdict):
                job.answer.set_result((answer, seconds))
            else:
                job.answer.set_exception(answer)

    def _count(self, jobs: list[_Job], seconds: float) -> None:
        counts = self.counts
        counts.passes += 1
        counts.rows += len(jobs)
        counts.tokens += sum(len(j.request.known) + len(j.request.tree.tokens) for j in jobs)
        counts.seconds += seconds

    def _free_left_rows(self) -> None:
        self._running = set()
        for row in list(self._leaving):
            self._leaving.discard(row)
            self.close(row)

    async def _pass(self, requests: list[Request]) -> list[Verdict | Exception]:
        """One pass in the thread; where it fails, each row alone, so that one harms no other."""
        loop = asyncio.get_running_loop()
        working = loop.run_in_executor(self._pool, self._decide, requests)
        try:
            # Cancelled or not, the pass ends before its rows may be lent again.
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.wait([working])
            raise

    def _decide(self, requests: list[Request]) -> list[Verdict | Exception]:
        try:
            return list(run_now(self._verifier.verify(requests)))
        except Exception as error:  # noqa: BLE001 - whoever asked is told, the others go on
            if len(requests) == 1:
                return [error]
            return [answer for one in requests for answer in self._decide([one])]
