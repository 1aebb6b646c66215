"""A gRPC server around a `TargetService`, with WebSockets beside it where they are asked for."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection

from moaspec.errors import InputError, LinkError, MoaSpecError, RefusedError, WireError
from moaspec.process_memory import return_memory_forever
from moaspec.remote.protocol.grpc_transport import OPTIONS, SERVICE
from moaspec.remote.server.auth import CallAuth, UnknownClientError
from moaspec.remote.server.listeners.admission import Admission, LateRequestError, request_deadline
from moaspec.remote.server.listeners.calls import CALLS, Call
from moaspec.remote.server.listeners.websocket_server import WebSocketListener, WebSocketOptions
from moaspec.remote.server.service import TargetService
from moaspec.remote.server.session_store import ForeignSessionError, NoRoomError
from moaspec.support import limits
from moaspec.support.ports import joined_address
from moaspec.support.tasks import end_tasks

Context = Any  # gRPC has no types
Continue = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]

STATUSES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (UnknownClientError, grpc.StatusCode.UNAUTHENTICATED),
    (ForeignSessionError, grpc.StatusCode.PERMISSION_DENIED),
    (NoRoomError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (WireError, grpc.StatusCode.INVALID_ARGUMENT),
    (InputError, grpc.StatusCode.INVALID_ARGUMENT),
    (RefusedError, grpc.StatusCode.FAILED_PRECONDITION),
    (LateRequestError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (LinkError, grpc.StatusCode.UNAVAILABLE),
    (MoaSpecError, grpc.StatusCode.INTERNAL),
)
"""The gRPC status of each of our errors; the first match counts."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Address, credentials and limits of a server.

    Attributes:
        port: 0 takes a free one.
        credentials: for TLS; None listens without TLS.
        max_connections: calls at the same time; one client may have half of them. Further calls are
            refused for now. Clients without credentials are identified by address.
        connection_s: longest duration of a connection, after which credentials are checked again.
        sweep_s: seconds between two searches for idle sessions.
        websocket: where to listen for WebSockets too; None does not.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    credentials: grpc.ServerCredentials | None = None
    guard: CallAuth = field(default_factory=CallAuth)
    max_connections: int = 256
    connection_s: float = 3600.0
    sweep_s: float = 5.0
    websocket: WebSocketOptions | None = None


class GrpcServer:
    """Serves over gRPC, and over WebSockets if asked, until `drain` or until the context ends.

    Attributes:
        websocket: listens for WebSockets; None where the options name no address for them.

    Raises:
        InputError: on entering, where the address cannot be listened on.
    """

    def __init__(self, service: TargetService, options: ServerOptions | None = None) -> None:
        self.service, self._options = service, options or ServerOptions()
        self._admission = Admission(
            self._options.guard,
            service.observer,
            max_calls=self._options.max_connections,
            call_s=self._options.connection_s,
        )
        self.websocket: WebSocketListener | None = None
        if self._options.websocket is not None:
            self.websocket = WebSocketListener(service, self._admission, self._options.websocket)
        self._server = grpc.aio.server(
            options=[
                # Of an option that is given twice, gRPC takes the first.
                ("grpc.max_receive_message_length", service.capabilities.limits.max_bytes),
                *OPTIONS,
                ("grpc.max_allowed_incoming_connections", limits.MAX_GRPC_CONNECTIONS),
                ("grpc.max_concurrent_streams", limits.MAX_GRPC_CALLS_PER_CONNECTION),
                ("grpc.server_handshake_timeout_ms", limits.MAX_HANDSHAKE_S * 1000),
                ("grpc.max_connection_idle_ms", limits.MAX_GRPC_IDLE_S * 1000),
                # Devices may send HTTP/2 pings besides our heartbeats.
                ("grpc.http2.min_ping_interval_without_data_ms", 200),
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 5_000),
                ("grpc.so_reuseport", 0),
            ],
            interceptors=[_OpenCalls(self._admission)],
        )
        self._health = health.HealthServicer()
        self._repeated: list[asyncio.Task[None]] = []
        self.port = 0

    async def __aenter__(self) -> GrpcServer:
        address = joined_address(self._options.host, self._options.port)
        credentials = self._options.credentials
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise InputError(f"Cannot listen on {address}: is the port in use?") from error
        self._add_services()
        if self.websocket is not None:
            await self.websocket.start()
        await self._server.start()
        await self._health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        self._repeated = [
            asyncio.create_task(work) for work in (self._sweep(), return_memory_forever())
        ]
        return self

    @property
    def address(self) -> str:
        """The address that it listens on, HOST:PORT."""
        return joined_address(self._options.host, self.port)

    async def __aexit__(self, *_: object) -> None:
        """Stop at once; call `drain` first to let devices finish."""
        await end_tasks(*self._repeated)
        await self._server.stop(0)
        if self.websocket is not None:
            await self.websocket.stop()
        await self.service.stop()

    async def drain(self, timeout_s: float = 10.0) -> None:
        """Refuse new work, finish running work, and notify devices and load balancers."""
        await self._health.enter_graceful_shutdown()
        await self.service.drain(timeout_s)
        await self._server.stop(timeout_s / 10)
        if self.websocket is not None:
            await self.websocket.stop()

    def _add_services(self) -> None:
        # As streams: gRPC would read the request of another call before the call is admitted.
        handlers = {
            name: grpc.stream_stream_rpc_method_handler(self._handler(call))
            for name, call in CALLS.items()
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, handlers),)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), self._server)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._options.sweep_s)
            self.service.sessions.sweep()

    def _handler(self, call: Call) -> Callable[[Any, Context], Awaitable[None]]:
        async def handle(_: Any, context: Context) -> None:
            client = (*_credentials(context), _address(context))
            async with _told_errors(context), self._admission.call(*client) as owner:
                await context.send_initial_metadata(())
                await call(self.service, owner, _ServerConnection(context))

        return handle


def _credentials(context: Context) -> tuple[str | None, str | None]:
    """The bearer token of a call, and the name in the client's certificate."""
    metadata = dict(context.invocation_metadata() or ())
    scheme, _, token = str(metadata.get("authorization", "")).partition(" ")
    names = context.auth_context().get("x509_common_name", ())
    peer = next((name.decode(errors="replace") for name in names), None)
    return token if scheme == "Bearer" else None, peer


def _address(context: Context) -> str:
    """The address of a client without the port: "192.0.2.1" for "ipv4:192.0.2.1:1234"."""
    host = str(context.peer()).partition(":")[2].rpartition(":")[0]
    return unquote(host).strip("[]")


class _OpenCalls(grpc.aio.ServerInterceptor):
    """Admits calls of the services that need no credentials, before their requests are read."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    async def intercept_service(
        self, continuation: Continue, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """See gRPC; calls are served as streams, so that this class reads the request."""
        handler = await continuation(handler_call_details)
        if handler is None or str(handler_call_details.method).startswith(f"/{SERVICE}/"):
            return handler

        async def call(requests: Any, context: Context) -> None:
            async with _told_errors(context), self._admission.open_call(_address(context)):
                await _answer(handler, requests, context)

        return grpc.stream_stream_rpc_method_handler(
            call, handler.request_deserializer, handler.response_serializer
        )


async def _answer(handler: Any, requests: Any, context: Context) -> None:
    """Call a handler of any kind as gRPC does."""
    given = requests
    if not handler.request_streaming:
        async with request_deadline():
            given = await context.read()
        if given is grpc.aio.EOF:
            raise WireError("The call has no request.")
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


@asynccontextmanager
async def _told_errors(context: Context) -> AsyncIterator[None]:
    """Tell the client of our errors."""
    try:
        yield
    except MoaSpecError as error:
        status = next(status for kind, status in STATUSES if isinstance(error, kind))
        await context.abort(status, str(error))


class _ServerConnection:
    """A `Connection` over one gRPC stream."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def send(self, frame: bytes) -> None:
        with _translated_errors():
            await self._context.write(frame)

    async def receive(self) -> bytes:
        with _translated_errors():
            frame: Any = await self._context.read()
        if frame is grpc.aio.EOF:
            raise LinkError("The device ended the connection.")
        return bytes(frame)

    async def close(self) -> None:
        """Do nothing: gRPC closes the stream when the call returns."""


@contextmanager
def _translated_errors() -> Any:
    try:
        yield
    except (grpc.RpcError, grpc.aio.BaseError, grpc.aio.InternalError) as error:
        raise LinkError("The device is gone.") from error
    except asyncio.InvalidStateError as error:
        raise LinkError("The connection was closed.") from error
