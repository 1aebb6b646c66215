"""Admission of gRPC calls: a budget for each kind of call, and deadlines for requests."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from moaspec.remote.server.auth import ANONYMOUS
from moaspec.remote.server.session_store import NoRoomError, Quota
from moaspec.support import limits

Context = Any
Continue = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class Admission(grpc.aio.ServerInterceptor):
    """Limits calls before their requests are read.

    Args:
        service: name of the service whose calls need credentials.
        owner: finds the owner of a call; aborts calls with wrong credentials.
        max_calls: number of calls with valid credentials at the same time.
    """

    def __init__(
        self, service: str, owner: Callable[[Context], Awaitable[str]], max_calls: int
    ) -> None:
        self._prefix, self._find_owner = f"/{service}/", owner
        self._all = Quota(lambda _: max_calls, "calls, all clients together")
        self._own = Quota(lambda _: max(1, max_calls // 2), "calls")
        self._open = Quota(lambda _: limits.MAX_OPEN_CALLS, "calls without a token")
        most = limits.MAX_OPEN_CALLS_PER_ADDRESS
        self._open_here = Quota(lambda _: most, "calls without a token from this address")

    async def intercept_service(
        self, continuation: Continue, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """See gRPC; calls are served as streams, so that this class reads the request."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        known = str(handler_call_details.method).startswith(self._prefix)

        async def call(requests: Any, context: Context) -> None:
            admitted = self._known if known else self._unknown
            await admitted(handler, requests, context)

        return grpc.stream_stream_rpc_method_handler(
            call, handler.request_deserializer, handler.response_serializer
        )

    async def _known(self, handler: Any, requests: Any, context: Context) -> None:
        owner = await self._find_owner(context)
        client = _address(context) if owner == ANONYMOUS else owner
        try:
            with self._own.one(client), self._all.one(""):
                await _answer(handler, requests, context)
        except NoRoomError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))

    async def _unknown(self, handler: Any, requests: Any, context: Context) -> None:
        try:
            with self._open_here.one(_address(context)), self._open.one(""):
                async with asyncio.timeout(limits.MAX_OPEN_CALL_S):
                    await _answer(handler, requests, context)
        except NoRoomError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except TimeoutError:
            message = f"Such a call lasts at most {limits.MAX_OPEN_CALL_S} s; make another."
            await context.abort(grpc.StatusCode.UNAVAILABLE, message)


def _address(context: Context) -> str:
    """The address of a client without the port: "ipv4:192.0.2.1"."""
    return str(context.peer()).rpartition(":")[0]


async def _answer(handler: Any, requests: Any, context: Context) -> None:
    """Call a handler of any kind as gRPC does."""
    given = requests
    if not handler.request_streaming:
        given = await _request(context)
    kinds = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    behaviour = next(one for one in kinds if one is not None)
    result = behaviour(given, context)
    if inspect.isasyncgen(result):
        async for message in result:
            await context.write(message)
        return
    message = await result
    if message is not None:
        await context.write(message)


async def _request(context: Context) -> Any:
    try:
        async with asyncio.timeout(limits.MAX_REQUEST_S):
            request = await context.read()
    except TimeoutError:
        message = f"The request did not arrive within {limits.MAX_REQUEST_S} s."
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, message)
    if request is grpc.aio.EOF:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "The call has no request.")
    return request
