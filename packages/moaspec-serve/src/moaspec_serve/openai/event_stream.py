"""Server-sent events, and work that ends when the client disconnects."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from moaspec_core.support.tasks import end_tasks
from moaspec_serve.http_errors import RequestError, error_response

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a request whose client disconnected. Only logs show it."""


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; RequestError where the client disconnects first."""
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
        events: bodies of the events. An error becomes a last event in OpenAI's format.
        close: cancels the texts; called at the end.
        named: whether events are named by their `type`, as in /v1/responses.
        send_timeout_s: maximum time that a client may leave its connection full.
    """

    def __init__(
        self,
        events: AsyncGenerator[dict[str, Any]],
        close: Callable[[], Awaitable[None]],
        *,
        named: bool = False,
        send_timeout_s: float,
    ) -> None:
        headers = {"X-Accel-Buffering": "no"}
        super().__init__(_lines(events, named), headers=headers, media_type="text/event-stream")
        self._close, self._send_timeout_s = close, send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send events until the end, or until the client disconnects or stops reading."""

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self._send_timeout_s):
                await send(message)

        try:
            with contextlib.suppress(Exception):  # nothing can be sent any more
                await unless_disconnected(receive, self.stream_response(send_in_time))
        finally:
            await self._close()


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
