"""The server around a `TargetService`: calls over WebSockets, and `GET /health`."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from weakref import WeakSet

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.http11 import Request, Response

from moaspec_core.errors import InputError, LinkError, MoaSpecError, RefusedError, WireError
from moaspec_core.process_memory import return_memory_forever
from moaspec_core.support import limits
from moaspec_core.support.ports import bind, joined_address, reuse_address
from moaspec_core.support.tasks import end_tasks
from moaspec_edge.protocol.websocket_transport import (
    BUSY,
    FORBIDDEN,
    INVALID,
    REFUSED,
    SUBPROTOCOL,
    UNKNOWN_CLIENT,
    WebSocketConnection,
)
from moaspec_edge.server.auth import LOCAL_HOSTS, CallAuth, UnknownClientError
from moaspec_edge.server.listeners.admission import Admission
from moaspec_edge.server.listeners.calls import CALLS
from moaspec_edge.server.service import TargetService
from moaspec_edge.server.session_store import ForeignSessionError, NoRoomError, RateLimit

PATHS = {f"/v1/{name.lower()}": call for name, call in CALLS.items()}

CLOSE_CODES: tuple[tuple[type[Exception], int], ...] = (
    (UnknownClientError, UNKNOWN_CLIENT),
    (ForeignSessionError, FORBIDDEN),
    (NoRoomError, BUSY),
    (WireError, INVALID),
    (InputError, INVALID),
    (RefusedError, REFUSED),
    (LinkError, 1001),
    (MoaSpecError, 1011),
)
"""The close code of each of our errors; the first match counts."""

TOKEN_PREFIX = "moaspec.token."  # noqa: S105 - precedes the token
"""A subprotocol that carries a token, in base64url without padding, for browsers: they cannot set
headers, and URLs appear in logs."""

CLOSE_S = 1.0
"""Time until a connection that a client does not close is aborted."""

SWEEP_S = 5.0
"""Seconds between two searches for idle sessions."""

MAX_HEAD_BYTES = 1 << 16
"""Bytes of a handshake; the library's own limits add up to 1 MiB."""

MAX_LINE_BYTES = 8192
"""Bytes of a connection's first line; a longer one is for no path of ours."""

PIECE_BYTES = 4096
"""Bytes that are parsed before frames are counted; more hold up all other work."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Address, credentials and limits of a server.

    Attributes:
        port: 0 takes a free one.
        tls: settings of TLS, see `server_tls`; None listens without TLS.
        guard: whose tokens are accepted.
        origins: web pages of these origins may connect, and no others, such as
            "https://example.org". Programs that are no browsers send none.
        http: makes the protocol of a connection whose first request is for none of our paths. The
            pages that it serves may connect too: over TLS under any name, else under a loopback
            name. None answers such requests with 404.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    tls: ssl.SSLContext | None = None
    guard: CallAuth = field(default_factory=CallAuth)
    origins: tuple[str, ...] = ()
    http: Callable[[], asyncio.Protocol] | None = None


class TargetServer:
    """Serves calls, and `GET /health`, until `drain` or until the context ends.

    Attributes:
        url: ws://HOST:PORT or wss://HOST:PORT, while it listens.

    Raises:
        InputError: on entering, where the address cannot be listened on.
    """

    def __init__(self, service: TargetService, options: ServerOptions | None = None) -> None:
        self.service, self._options = service, options or ServerOptions()
        self._admission = Admission(self._options.guard, service.observer)
        self._server: Server | None = None
        self._listener: _Listener | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        self._transports: WeakSet[asyncio.Transport] = WeakSet()
        self._repeated: list[asyncio.Task[None]] = []
        self.url = ""

    @property
    def has_page(self) -> bool:
        """Whether the address serves a page too."""
        return self._options.http is not None

    async def __aenter__(self) -> TargetServer:
        options = self._options
        self._listener = listener = _Listener(bind(options.host, options.port))
        reuse_address(listener)
        self._server = await serve(
            self._serve,
            sock=listener,
            ssl=options.tls,
            create_connection=self._connection,  # type: ignore[arg-type]
            process_request=self._respond,
            origins=[None, *options.origins],  # type: ignore[list-item]
            subprotocols=[SUBPROTOCOL],
            compression=None,
            server_header=None,
            open_timeout=limits.MAX_HANDSHAKE_S,
            ping_interval=10,
            close_timeout=CLOSE_S,
            max_size=self.service.capabilities.limits.max_bytes,
            max_queue=2,
        )
        scheme = "ws" if options.tls is None else "wss"
        self.url = f"{scheme}://{joined_address(options.host, listener.getsockname()[1])}"
        self._repeated = [
            asyncio.create_task(work) for work in (self._sweep(), return_memory_forever())
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop at once; call `drain` first to let devices finish."""
        await end_tasks(*self._repeated)
        await self._close(0.0)
        await self.service.stop()

    async def drain(self, timeout_s: float = 10.0) -> None:
        """Refuse new work, finish running work, and notify devices and load balancers."""
        await self.service.drain(timeout_s)
        await self._close(timeout_s / 10)

    async def _close(self, grace_s: float) -> None:
        """Stop listening, let calls end by themselves for a time, and close all connections.

        A client that does not read prolongs this by two seconds at most.
        """
        if self._server is None or self._listener is None:
            return
        server, self._server = self._server, None
        # asyncio forgets, and leaves open, what it has accepted as a server closes and has no
        # transport yet: so nothing is accepted from here, and earlier ones get theirs.
        self._listener.refuses = True
        await asyncio.sleep(0)
        server.close(close_connections=False)
        if self._calls and grace_s > 0:
            await asyncio.wait(self._calls, timeout=grace_s)
        farewells = [
            asyncio.create_task(connection.close(1001)) for connection in server.connections
        ]
        if farewells:
            await asyncio.wait(farewells, timeout=CLOSE_S)
        await end_tasks(*farewells, *self._calls)
        for transport in list(self._transports):
            transport.abort()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await server.wait_closed()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.service.sessions.sweep()

    def _connection(self, *arguments: Any, **options: Any) -> asyncio.Protocol:
        ours = _LimitedConnection(self._transports, *arguments, **options)
        http = self._options.http
        return ours if http is None else _FirstLine(ours, http, self._transports)

    def _respond(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer requests that open no call."""
        if self._options.http is not None:
            own = _own_origin(request, secure=self._options.tls is not None)
            connection.protocol.origins = [*(connection.protocol.origins or ()), *own]
        if request.path == "/health":
            return self._health(connection)
        if request.path not in PATHS:
            return connection.respond(HTTPStatus.NOT_FOUND, "There is no such call.\n")
        return None

    def _health(self, connection: ServerConnection) -> Response:
        """Answer whether calls are served, also to pages of other origins that may make calls."""
        if self.service.draining:
            response = connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "NOT_SERVING\n")
        else:
            response = connection.respond(HTTPStatus.OK, "SERVING\n")
        response.headers["Access-Control-Allow-Origin"] = "*"
        return response

    async def _serve(self, connection: ServerConnection) -> None:
        """Serve the call that a connection was opened for."""
        task = asyncio.current_task()
        assert task is not None
        assert connection.request is not None
        self._calls.add(task)
        ours = WebSocketConnection(connection)
        credentials = (_token(connection.request), _peer_name(connection))
        try:
            async with self._admission.call(*credentials, _address(connection)) as owner:
                await PATHS[connection.request.path](self.service, owner, ours)
            await ours.close(timeout_s=CLOSE_S)
        except MoaSpecError as error:
            code = next(code for kind, code in CLOSE_CODES if isinstance(error, kind))
            await ours.close(code, str(error), CLOSE_S)
        finally:
            self._calls.discard(task)
            # The library would wait without end for a client that does not read.
            connection.transport.abort()


class _LimitedConnection(ServerConnection):
    """A connection that is cut when its handshake is too long, or when it sends too many frames.

    Control frames and empty fragments cost time, and a service that counts messages sees neither.
    """

    def __init__(
        self, transports: WeakSet[asyncio.Transport], *arguments: Any, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._transports = transports
        self._allowance = RateLimit(limits.MAX_WEBSOCKET_FRAMES_PER_S)
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transports.add(transport)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            self._head_bytes += len(piece) if self.request is None else 0
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.abort()
            if self.transport.is_closing():
                return
            super().data_received(piece)

    def process_event(self, event: Any) -> None:
        if self.transport.is_closing():
            return
        try:
            self._allowance.take()
        except RefusedError:
            self.transport.abort()
            return
        super().process_event(event)


class _FirstLine(asyncio.Protocol):
    """Reads the first line of a connection, and hands the connection to who serves its path.

    Args:
        ours: serves `PATHS` and /health.
        http: makes the protocol that serves other paths.
    """

    def __init__(
        self,
        ours: asyncio.Protocol,
        http: Callable[[], asyncio.Protocol],
        transports: WeakSet[asyncio.Transport],
    ) -> None:
        self._ours, self._http, self._transports = ours, http, transports
        self._head = b""
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the line, as long as a handshake may take."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._transports.add(transport)
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(limits.MAX_HANDSHAKE_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Take in data up to the end of the line."""
        assert self._transport is not None
        assert self._deadline is not None
        self._head += data
        line, end, _ = self._head.partition(b"\r\n")
        if not end and len(self._head) <= MAX_LINE_BYTES:
            return
        self._deadline.cancel()
        words = line[:MAX_LINE_BYTES].split(b" ")
        path = words[1].decode("ascii", "replace") if len(words) > 1 else ""
        chosen = self._ours if path == "/health" or path in PATHS else self._http()
        self._transport.set_protocol(chosen)
        chosen.connection_made(self._transport)
        chosen.data_received(self._head)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self._deadline is not None:
            self._deadline.cancel()


class _Listener(socket.socket):
    """A listening socket that refuses connections beyond the limits of all and of one address.

    They are counted when they are accepted, so that those without a TLS handshake count too.

    Attributes:
        refuses: whether it refuses all.
    """

    refuses = False

    def __init__(self, bound: socket.socket) -> None:
        super().__init__(bound.family, bound.type, bound.proto, fileno=bound.detach())
        self._counts: Counter[str] = Counter()

    def accept(self) -> tuple[socket.socket, Any]:
        accepted, address = super().accept()
        host = str(address[0])
        if (
            self.refuses
            or self._counts.total() >= limits.MAX_HTTP_CONNECTIONS
            or self._counts[host] >= limits.MAX_HTTP_CONNECTIONS_PER_ADDRESS
        ):
            accepted.close()
            raise ConnectionAbortedError("no further connection")
        self._counts[host] += 1
        return _Accepted(accepted, lambda: self._release(host)), address

    def _release(self, host: str) -> None:
        self._counts[host] -= 1
        self._counts += Counter()  # removes zeros


class _Accepted(socket.socket):
    """A connection that is counted until it is closed."""

    def __init__(self, accepted: socket.socket, release: Callable[[], None]) -> None:
        super().__init__(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        self._release: Callable[[], None] | None = release

    def close(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()
        super().close()


def _own_origin(request: Request, *, secure: bool) -> list[Any]:
    """The origin of the pages that this address serves; empty for a name that it may not have.

    Without TLS, a name that is no loopback name may be a foreign page's that leads here (DNS
    rebinding).
    """
    host = ", ".join(request.headers.get_all("Host"))
    name = host.rpartition(":")[0] or host
    if secure:
        return [f"https://{host}"]
    return [f"http://{host}"] if name.strip("[]") in LOCAL_HOSTS else []


def _token(request: Request) -> str | None:
    """The token of a handshake: in `Authorization`, or in a subprotocol."""
    scheme, _, token = ", ".join(request.headers.get_all("Authorization")).partition(" ")
    if scheme == "Bearer":
        return token
    offered = ",".join(request.headers.get_all("Sec-WebSocket-Protocol")).split(",")
    for name in map(str.strip, offered):
        if name.startswith(TOKEN_PREFIX):
            encoded = name.removeprefix(TOKEN_PREFIX)
            try:
                return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode()
            except (binascii.Error, UnicodeDecodeError):
                return None
    return None


def _peer_name(connection: ServerConnection) -> str | None:
    """The name in the client's certificate, if TLS has verified one."""
    certificate = connection.transport.get_extra_info("peercert") or {}
    parts = (part for name in certificate.get("subject", ()) for part in name)
    return next((value for key, value in parts if key == "commonName"), None)


def _address(connection: ServerConnection) -> str:
    """The address of a client without the port."""
    return str(connection.remote_address[0])
