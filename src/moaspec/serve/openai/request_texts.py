"""The texts of one request: decoded together, merged into one stream, let go if nobody listens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from moaspec.serve.http_errors import answer_to
from moaspec.serve.metrics import Metrics
from moaspec.serve.openai.counts import TokenCounts
from moaspec.serve.sources.source import Job, TextSource, Update, Updates

T = TypeVar("T")

CLIENT_LEFT = 499
"""Nobody reads it; logs show it. The number is nginx's."""


class RequestTexts:
    """Decodes the jobs of one request.

    Args:
        source: decodes.
        jobs: accepted all or none.
        endpoint, metrics: where they are counted, and under which name.

    Raises:
        InputError, BusyError: see `TextSource.open`.
    """

    def __init__(
        self, source: TextSource, jobs: Sequence[Job], *, endpoint: str, metrics: Metrics
    ) -> None:
        self.jobs, self.tallies = jobs, [TokenCounts() for _ in jobs]
        self._endpoint, self._metrics = endpoint, metrics
        self._streams = source.open(jobs)
        self._left = set(range(len(jobs)))
        self._outcome = "cancelled"
        self._news: asyncio.Queue[tuple[int, Update | Exception]] = asyncio.Queue()
        self._readers = [
            asyncio.create_task(self._read(i, one)) for i, one in enumerate(self._streams)
        ]

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """Number of a text and what happened to it, until all have ended."""
        while self._left:
            index, news = await self._news.get()
            if isinstance(news, Exception):
                self._outcome = "failed"
                raise news
            self.tallies[index].take(news)
            if news.stop_reason is not None:
                self._left.discard(index)
                self._count(index, "done")
            yield index, news

    async def close(self) -> None:
        """End what is not done; may be called more than once."""
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for stream in self._streams:
            await stream.aclose()
        for index in self._left:
            self._count(index, self._outcome)
        self._left.clear()

    async def _read(self, index: int, stream: Updates) -> None:
        try:
            async for update in stream:
                self._news.put_nowait((index, update))
        except Exception as error:  # noqa: BLE001 - whoever reads the news raises it
            self._news.put_nowait((index, error))

    def _count(self, index: int, outcome: str) -> None:
        prompt_tokens = len(self.jobs[index].prompt_ids)
        self._metrics.count(self._endpoint, outcome, prompt_tokens, self.tallies[index])


async def unless_left(
    request: Request, run: RequestTexts, work: Coroutine[Any, Any, T]
) -> T | Response:
    """The result of `work`; when the client leaves first, the run ends and nothing is answered."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(left(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else Response(status_code=CLIENT_LEFT)
    finally:
        await end_tasks(working, leaving)
        await run.close()


class EventStream(StreamingResponse):
    """Server-sent events of a run, which ends when the client leaves or does not read.

    Args:
        run: what is decoded.
        events: bodies of events, in order. An error becomes a last event in OpenAI's shape.
        named: events carry their `type` as name too, as those of /v1/responses do.
        send_timeout_s: how long a client may let its connection be full.
    """

    def __init__(
        self,
        run: RequestTexts,
        events: AsyncGenerator[dict[str, Any]],
        *,
        named: bool = False,
        send_timeout_s: float,
    ) -> None:
        headers = {"X-Accel-Buffering": "no"}
        super().__init__(_lines(events, named), headers=headers, media_type="text/event-stream")
        self._run, self._send_timeout_s = run, send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send until the end, or until nobody reads."""

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self._send_timeout_s):
                await send(message)

        sending = asyncio.create_task(self.stream_response(send_in_time))
        leaving = asyncio.create_task(left(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(sending, leaving)
            await self._run.close()


async def _lines(events: AsyncGenerator[dict[str, Any]], named: bool) -> AsyncIterator[str]:
    try:
        async for event in events:
            yield _line(event, event["type"] if named else None)
    except Exception as error:  # noqa: BLE001 - the status is sent already; this is what is left
        _, body = answer_to(error)
        if named:
            yield _line({"type": "error", **body["error"]}, "error")
        else:
            yield _line(body, None)
    finally:
        await events.aclose()
    if not named:
        yield "data: [DONE]\n\n"


def _line(event: dict[str, Any], name: str | None) -> str:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(event, separators=(',', ':'))}\n\n"


async def left(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
