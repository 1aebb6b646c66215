"""A gRPC server around a `TargetService`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection

from moaspec.errors import InputError, LinkError, MoaSpecError, RefusedError, WireError
from moaspec.process_memory import return_memory_forever
from moaspec.remote.protocol import target_pb2 as pb
from moaspec.remote.protocol import wire
from moaspec.remote.protocol.grpc_transport import OPTIONS, SERVICE
from moaspec.remote.server.admission import Admission
from moaspec.remote.server.auth import CallAuth
from moaspec.remote.server.service import TargetService
from moaspec.remote.server.session_store import ForeignSessionError, NoRoomError
from moaspec.support import limits
from moaspec.support.refusal_delay import RefusalDelay

STATUSES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (ForeignSessionError, grpc.StatusCode.PERMISSION_DENIED),
    (NoRoomError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (WireError, grpc.StatusCode.INVALID_ARGUMENT),
    (InputError, grpc.StatusCode.INVALID_ARGUMENT),
    (RefusedError, grpc.StatusCode.FAILED_PRECONDITION),
    (LinkError, grpc.StatusCode.UNAVAILABLE),
    (MoaSpecError, grpc.StatusCode.INTERNAL),
)
"""The gRPC status of each of our errors; the first match counts."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Address, credentials and limits of a server.

    Attributes:
        host: address to listen on.
        port: 0 takes a free one.
        credentials: for TLS; None listens without TLS.
        guard: decides which clients are accepted.
        max_connections: calls at the same time; one client may have half of them. Further calls are
            refused for now. Clients without credentials are identified by address.
        connection_s: longest duration of a connection, after which credentials are checked again.
        sweep_s: seconds between two searches for idle sessions.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    credentials: grpc.ServerCredentials | None = None
    guard: CallAuth = field(default_factory=CallAuth)
    max_connections: int = 256
    connection_s: float = 3600.0
    sweep_s: float = 5.0


class GrpcServer:
    """Serves until `drain` or until the context ends.

    Args:
        service: answers.
        options: see `ServerOptions`.

    Raises:
        InputError: on entering, where the address cannot be listened on.
    """

    def __init__(self, service: TargetService, options: ServerOptions | None = None) -> None:
        self.service, self._options = service, options or ServerOptions()
        self._server = grpc.aio.server(
            options=[
                # Of an option that is given twice, gRPC takes the first.
                ("grpc.max_receive_message_length", service.capabilities.limits.max_bytes),
                *OPTIONS,
                ("grpc.max_allowed_incoming_connections", limits.MAX_GRPC_CONNECTIONS),
                ("grpc.max_concurrent_streams", limits.MAX_GRPC_CALLS_PER_CONNECTION),
                ("grpc.server_handshake_timeout_ms", limits.MAX_GRPC_HANDSHAKE_S * 1000),
                ("grpc.max_connection_idle_ms", limits.MAX_GRPC_IDLE_S * 1000),
                # Devices may send HTTP/2 pings besides our heartbeats.
                ("grpc.http2.min_ping_interval_without_data_ms", 200),
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 5_000),
                ("grpc.so_reuseport", 0),
            ],
            interceptors=[Admission(SERVICE, self._owner, self._options.max_connections)],
        )
        self._slow = RefusalDelay()
        self._health = health.HealthServicer()
        self._repeated: list[asyncio.Task[None]] = []
        self.port = 0

    async def __aenter__(self) -> GrpcServer:
        """Listen and accept calls."""
        address = self._address(self._options.port)
        credentials = self._options.credentials
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise InputError(f"Cannot listen on {address}: is the port in use?") from error
        self._add_services()
        await self._server.start()
        await self._health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        self._repeated = [
            asyncio.create_task(work) for work in (self._sweep(), return_memory_forever())
        ]
        return self

    def _address(self, port: int) -> str:
        host = self._options.host
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def address(self) -> str:
        """The address that it listens on, HOST:PORT."""
        return self._address(self.port)

    async def __aexit__(self, *_: object) -> None:
        """Stop at once; call `drain` first to let devices finish."""
        for task in self._repeated:
            task.cancel()
        await asyncio.gather(*self._repeated, return_exceptions=True)
        await self._server.stop(0)
        await self.service.stop()

    async def drain(self, timeout_s: float = 10.0) -> None:
        """Refuse new work, finish running work, and notify devices and load balancers."""
        await self._health.enter_graceful_shutdown()
        await self.service.drain(timeout_s)
        await self._server.stop(timeout_s / 10)

    def _add_services(self) -> None:
        handlers: dict[str, Any] = {
            "Describe": grpc.unary_unary_rpc_method_handler(
                self._describe, response_serializer=pb.Description.SerializeToString
            ),
            "Converse": grpc.stream_stream_rpc_method_handler(self._converse),
            "Generate": grpc.unary_stream_rpc_method_handler(
                self._generate, response_serializer=pb.Generated.SerializeToString
            ),
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

    async def _describe(self, _: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        await self._owner(context)
        return self.service.capabilities.describe()

    async def _converse(self, _: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        owner = await self._owner(context)
        await context.send_initial_metadata(())
        connection = _ServerConnection(context)
        try:
            async with self._limit_duration():
                await self.service.converse(owner, connection)
        except MoaSpecError as error:
            await context.abort(_status(error), str(error))

    async def _generate(
        self, frame: bytes, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.Generated]:
        owner = await self._owner(context)
        try:
            request = wire.parse_generate(frame)
            async with (
                self._limit_duration(),
                aclosing(self.service.generate(owner, request)) as texts,
            ):
                async for generated in texts:
                    yield generated
        except MoaSpecError as error:
            await context.abort(_status(error), str(error))

    @asynccontextmanager
    async def _limit_duration(self) -> AsyncIterator[None]:
        """Limit the duration of a call.

        Raises:
            LinkError: the limit is reached.
        """
        try:
            async with asyncio.timeout(self._options.connection_s):
                yield
        except TimeoutError as error:
            most = self._options.connection_s
            raise LinkError(f"A connection lasts at most {most:g} s; connect again.") from error

    async def _owner(self, context: grpc.aio.ServicerContext[Any, Any]) -> str:
        metadata = dict(context.invocation_metadata() or ())
        scheme, _, token = str(metadata.get("authorization", "")).partition(" ")
        names = context.auth_context().get("x509_common_name", ())
        peer = next((name.decode(errors="replace") for name in names), None)
        try:
            return self._options.guard.owner(token if scheme == "Bearer" else None, peer)
        except RefusedError as error:
            self.service.observer.refused("credentials")
            await self._slow.wait()
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
            raise


def _status(error: Exception) -> grpc.StatusCode:
    return next(status for kind, status in STATUSES if isinstance(error, kind))


class _ServerConnection:
    """A `Connection` over one gRPC stream."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
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
