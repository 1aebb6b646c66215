"""The texts of one request: decoded together, merged into one stream, cancelled on disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from moaspec.serve.http_errors import RequestError, error_response
from moaspec.serve.metrics import Metrics
from moaspec.serve.openai.token_counts import TokenCounts
from moaspec.serve.sources.source import Job, TextSource, Update, end_tasks

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a request whose client disconnected. Only logs show it."""


class RequestTexts:
    """Decodes the jobs of one request.

    Args:
        source: decodes the jobs.
        jobs: accepted all or none.
        endpoint: name of the endpoint in the metrics.
        metrics: counts the texts when they end.

    Attributes:
        counts: token counts of each text.

    Raises:
        InputError, BusyError: see `TextSource.submit`.
    """

    def __init__(
        self, source: TextSource, jobs: Sequence[Job], *, endpoint: str, metrics: Metrics
    ) -> None:
        self.jobs, self.counts = jobs, [TokenCounts() for _ in jobs]
        self._endpoint, self._metrics = endpoint, metrics
        self._unfinished = set(range(len(jobs)))
        self._outcome = "cancelled"
        self._news: asyncio.Queue[tuple[int, Update | Exception]] = asyncio.Queue()
        self._cancel = source.submit(jobs, lambda *news: self._news.put_nowait(news))

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """Yield (index of the text, update) until all texts have ended."""
        while self._unfinished:
            index, news = await self._news.get()
            if isinstance(news, Exception):
                self._outcome = "failed"
                raise news
            self.counts[index].add(news)
            if news.stop_reason is not None:
                self._unfinished.discard(index)
                self._count(index, "done")
            yield index, news

    async def close(self) -> None:
        """Cancel unfinished texts. May be called more than once."""
        await self._cancel()
        for index in self._unfinished:
            self._count(index, self._outcome)
        self._unfinished.clear()

    def _count(self, index: int, outcome: str) -> None:
        prompt_tokens = len(self.jobs[index].prompt_ids)
        self._metrics.count(self._endpoint, outcome, prompt_tokens, self.counts[index])


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`.

    Raises:
        RequestError: the client disconnected first.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_until_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RequestError("The client left.", status=CLIENT_CLOSED_REQUEST)
        return working.result()
    finally:
        await end_tasks(working, leaving)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events. The texts are cancelled if the client disconnects or stops reading.

    Args:
        texts: the texts in decoding.
        events: bodies of the events. An error becomes a last event in OpenAI's format.
        named: whether events are named by their `type`, as in /v1/responses.
        send_timeout_s: maximum time that a client may leave its connection full.
    """

    def __init__(
        self,
        texts: RequestTexts,
        events: AsyncGenerator[dict[str, Any]],
        *,
        named: bool = False,
        send_timeout_s: float,
    ) -> None:
        headers = {"X-Accel-Buffering": "no"}
        super().__init__(_lines(events, named), headers=headers, media_type="text/event-stream")
        self._texts, self._send_timeout_s = texts, send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send events until the end, or until the client disconnects or stops reading."""

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self._send_timeout_s):
                await send(message)

        try:
            with contextlib.suppress(Exception):  # nothing can be sent any more
                await unless_disconnected(receive, self.stream_response(send_in_time))
        finally:
            await self._texts.close()


async def _lines(events: AsyncGenerator[dict[str, Any]], named: bool) -> AsyncIterator[str]:
    try:
        async for event in events:
            yield _line(event, event["type"] if named else None)
    except Exception as error:  # noqa: BLE001 - the status line is sent already
        _, body = error_response(error)
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
