"""WebSockets beside gRPC: the same calls, frames, credentials and limits."""

import asyncio
import base64
import binascii
import contextlib
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from weakref import WeakSet

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.http11 import Request, Response

from moaspec.errors import InputError, LinkError, MoaSpecError, RefusedError, WireError
from moaspec.remote.protocol.websocket_transport import (
    BUSY,
    FORBIDDEN,
    INVALID,
    REFUSED,
    SUBPROTOCOL,
    UNKNOWN_CLIENT,
    WebSocketConnection,
)
from moaspec.remote.server.auth import LOCAL_HOSTS, UnknownClientError
from moaspec.remote.server.listeners.admission import Admission
from moaspec.remote.server.listeners.calls import CALLS
from moaspec.remote.server.service import TargetService
from moaspec.remote.server.session_store import ForeignSessionError, NoRoomError, RateLimit
from moaspec.support import limits
from moaspec.support.ports import bind, joined_address, reuse_address

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

BURST_S = 5.0
"""Seconds over which `MAX_WEBSOCKET_FRAMES_PER_S` is averaged."""

MAX_HEAD_BYTES = 1 << 16
"""Bytes of a handshake; the library's own limits add up to 1 MiB."""

MAX_LINE_BYTES = 8192
"""Bytes of a connection's first line; a longer one is for no path of ours."""

PIECE_BYTES = 4096
"""Bytes that are parsed before frames are counted; more hold up all other work."""


@dataclass(frozen=True, kw_only=True)
class WebSocketOptions:
    """Where to listen for WebSockets.

    Attributes:
        port: 0 takes a free one.
        tls: settings of TLS, see `server_tls`; None listens without TLS.
        origins: web pages of these origins may connect, and no others, such as
            "https://example.org". Programs that are no browsers send none.
        http: makes the protocol of a connection whose first request is for none of our paths. The
            pages that it serves may connect too: over TLS under any name, else under a loopback
            name. None answers such requests with 404.
    """

    host: str = "127.0.0.1"
    port: int = 0
    tls: ssl.SSLContext | None = None
    origins: tuple[str, ...] = ()
    http: Callable[[], asyncio.Protocol] | None = None


class WebSocketListener:
    """Serves calls over WebSockets, and `GET /health`.

    Args:
        admission: limits calls, together with those of other transports.

    Attributes:
        url: ws://HOST:PORT or wss://HOST:PORT, while it listens.
    """

    def __init__(
        self, service: TargetService, admission: Admission, options: WebSocketOptions
    ) -> None:
        self._service, self._admission, self._options = service, admission, options
        self._server: Server | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        self._transports: WeakSet[asyncio.Transport] = WeakSet()
        self.url = ""

    @property
    def has_page(self) -> bool:
        """Whether the address serves a page too."""
        return self._options.http is not None

    async def start(self) -> None:
        """Listen; InputError for an address that cannot be listened on."""
        options = self._options
        listener = _Listener(bind(options.host, options.port, option="--websocket"))
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
            max_size=self._service.capabilities.limits.max_bytes,
            max_queue=2,
        )
        scheme = "ws" if options.tls is None else "wss"
        self.url = f"{scheme}://{joined_address(options.host, listener.getsockname()[1])}"

    async def stop(self) -> None:
        """Close all connections; returns after two seconds at most."""
        if self._server is None:
            return
        self._server.close()
        await self._closed()
        for task in list(self._calls):
            task.cancel()
        for transport in list(self._transports):
            transport.abort()
        await self._closed()
        self._server = None

    async def _closed(self) -> None:
        assert self._server is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._server.wait_closed()

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
        if self._service.draining:
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
                await PATHS[connection.request.path](self._service, owner, ours)
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
        self._allowance = RateLimit(limits.MAX_WEBSOCKET_FRAMES_PER_S, BURST_S)
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
    """

    def __init__(self, bound: socket.socket) -> None:
        super().__init__(bound.family, bound.type, bound.proto, fileno=bound.detach())
        self._counts: Counter[str] = Counter()

    def accept(self) -> tuple[socket.socket, Any]:
        accepted, address = super().accept()
        host = str(address[0])
        if (
            self._counts.total() >= limits.MAX_HTTP_CONNECTIONS
            or self._counts[host] >= limits.MAX_HTTP_CONNECTIONS_PER_ADDRESS
        ):
            accepted.close()
            raise ConnectionAbortedError("too many connections")
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
