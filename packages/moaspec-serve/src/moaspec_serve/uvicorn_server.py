"""Runs the application with uvicorn."""

import asyncio
import contextlib
import errno
import re
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

import h11
import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from moaspec_core.errors import InputError
from moaspec_core.process_memory import freeze_loaded_objects, return_memory_forever
from moaspec_core.support import limits
from moaspec_core.support.ports import joined_address, reuse_address
from moaspec_serve.app import create_app
from moaspec_serve.http_errors import error_body
from moaspec_serve.server_context import ServeSettings
from moaspec_serve.sources.source import TextSource

LOOPBACK = ("127.0.0.1", "localhost", "::1")
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")  # loopback names in the `Host` header
HEAD_TIMEOUT_S = 30.0  # maximum time to receive a request's first line and headers
MAX_HEAD_BYTES = 16 << 10  # of a request's first line and headers, as uvicorn has
KEEP_ALIVE_S = 30  # maximum time that a connection may have no request
FREE_CHUNKS, CHUNK_BYTES = 256, 256
"""Chunks that a body may have, and bytes for each further one."""
REFUSED_S = 1.0  # time after which a body of more chunks is refused
GRACE_S = 5.0  # time that running answers have to finish when the server shuts down
ABSOLUTE = re.compile(rb"https?://([^/?#]*)(/.*)?$", re.IGNORECASE | re.DOTALL)
ERROR_S = 5.0  # additional time to send an error to the clients of unfinished answers


def serve(
    source: TextSource,
    settings: ServeSettings,
    *,
    host: str,
    listener: socket.socket,
    ready: Callable[[], None],
) -> None:
    """Serve until interrupted or terminated.

    Args:
        settings: see `ServeSettings`. Loopback names in the `Host` header are accepted beside
            `hosts`; on a loopback address, all others are refused.
        listener: socket bound to the address; closed at the end.
        ready: called when the server answers requests.

    Raises:
        InputError: another program listens on the address.
    """
    guarded = settings.guarded
    if host in LOOPBACK or guarded.hosts:
        hosts = (*LOOPBACK_HOSTS, *guarded.hosts)
        settings = replace(settings, guarded=replace(guarded, hosts=hosts))
    server = Server(config(create_app(source, settings)), source, ready=ready)
    freeze_loaded_objects()
    reuse_address(listener)
    # Uvicorn raises the signal that ended it again.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with contextlib.suppress(KeyboardInterrupt), listener:
            server.run([listener])
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise InputError(
            f"Cannot listen on {host}: {error.strerror}. Choose another --port."
        ) from error


class FewChunks(h11.Connection):
    """A connection whose requests may have few small chunks.

    Each chunk costs as much as a kilobyte, so that bodies in chunks of a byte would keep all others
    waiting, before the key is known and after.

    Attributes:
        refused: whether a request had too many.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self.refused = False
        self._room = FREE_CHUNKS * CHUNK_BYTES

    def next_event(self) -> Any:
        """See h11; RemoteProtocolError for too many small chunks."""
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._room += len(event.data) - CHUNK_BYTES
            if self._room < 0:
                self.refused = True
                raise h11.RemoteProtocolError("too many small chunks")
        elif isinstance(event, h11.Request):
            self._room = FREE_CHUNKS * CHUNK_BYTES
        return event


class HeadDeadline(H11Protocol):
    """Uvicorn's protocol with limits: headers have a deadline, addresses and chunks a number.

    Without the deadline, idle connections would occupy `MAX_HTTP_CONNECTIONS` forever.
    """

    conn: FewChunks
    _deadline: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = FewChunks()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection unless its address has too many."""
        super().connection_made(transport)
        if len(self.connections) > limits.MAX_HTTP_CONNECTIONS:
            self.app = _too_many_connections  # those that came before are served as before
        if self._num_same_address() > limits.MAX_HTTP_CONNECTIONS_PER_ADDRESS:
            transport.abort()
            return
        self._watch()

    def data_received(self, data: bytes) -> None:
        if self.conn.refused:
            return
        super().data_received(data)
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Answer late where chunks were refused, so that the next attempt comes late, too."""
        if not self.conn.refused:
            super().send_400_response(msg)
            return
        self.transport.pause_reading()
        self.loop.call_later(REFUSED_S, self._refuse)

    def _refuse(self) -> None:
        text = f"A body may have {FREE_CHUNKS} chunks, and one more for {CHUNK_BYTES} bytes each."
        if self.transport.is_closing():
            return
        with contextlib.suppress(h11.LocalProtocolError):  # an answer has begun
            super().send_400_response(text)
        self.transport.close()

    def handle_events(self) -> None:
        """Drop line ends before a request line, as RFC 9112 (2.2) asks for; h11 refuses them.

        They are taken out of h11 with all that follows, which a new state of the connection gets.
        """
        if self.conn.their_state is h11.IDLE and self.conn.our_state is h11.IDLE:
            data, _ = self.conn.trailing_data
            if data.startswith((b"\r", b"\n")):
                self.conn = FewChunks()
                # Without data h11 would take the connection for closed.
                if rest := data.lstrip(b"\r\n"):
                    self.conn.receive_data(rest)
        super().handle_events()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _num_same_address(self) -> int:
        if self.client is None:
            return 1
        clients = [getattr(connection, "client", None) for connection in self.connections]
        return sum(client is not None and client[0] == self.client[0] for client in clients)

    def _watch(self) -> None:
        """Run the deadline while the server waits for a request's headers."""
        waiting = self.cycle is None or self.cycle.response_complete
        if not waiting:
            self._stop()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self.timeout_keep_alive_handler)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Server(uvicorn.Server):
    """Uvicorn's server, which lets running answers finish at shutdown.

    Args:
        source: decodes the requests. Closed after `grace_s`, which ends answers with an error.
        ready: called when the server answers requests.
    """

    def __init__(
        self,
        settings: uvicorn.Config,
        source: TextSource,
        grace_s: float = GRACE_S,
        *,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        settings.timeout_graceful_shutdown = round(grace_s + ERROR_S)
        super().__init__(settings)
        self._source, self._grace_s, self._ready = source, grace_s, ready
        self._returning: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._returning = asyncio.create_task(return_memory_forever())
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down; close the source if answers take too long."""
        if self._returning is not None:
            self._returning.cancel()
        closing = asyncio.create_task(self._close_source())
        await super().shutdown(sockets)
        closing.cancel()

    async def _close_source(self) -> None:
        await asyncio.sleep(self._grace_s)
        await self._source.close()


def normal_requests(app: ASGIApp) -> ASGIApp:
    """Wrap an application, which gets one form of requests that may be written in several."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        await app(_normal(scope) if scope["type"] == "http" else scope, receive, send)

    return wrapped


def _normal(scope: Scope) -> Scope:
    """A request with a path, no slash at its end below /v1, and GET for HEAD.

    Proxies send targets of absolute form, whose authority counts and not the `Host` header's (RFC
    9112, 3.2.2). Uvicorn leaves out the body of answers to HEAD.
    """
    scope = dict(scope)
    target = ABSOLUTE.match(scope["raw_path"])
    if target is not None:
        others = [header for header in scope["headers"] if header[0] != b"host"]
        scope["headers"] = [(b"host", target[1]), *others]
        scope["raw_path"] = target[2] or b"/"
        scope["path"] = unquote(scope["raw_path"].decode("ascii"))
    if scope["path"].startswith("/v1/"):
        scope["path"] = scope["path"].rstrip("/")
        scope["raw_path"] = scope["raw_path"].rstrip(b"/")
    if scope["method"] == "HEAD":
        scope["method"] = "GET"
    return scope


async def _too_many_connections(scope: Scope, receive: Receive, send: Send) -> None:
    text = (
        f"This server has {limits.MAX_HTTP_CONNECTIONS} connections, as many as it takes. Those "
        f"without a request end after {KEEP_ALIVE_S} s; try again then."
    )
    headers = {"Retry-After": str(KEEP_ALIVE_S), "connection": "close"}
    await JSONResponse(error_body(503, text), 503, headers)(scope, receive, send)


def config(app: Any, **options: Any) -> uvicorn.Config:
    """Uvicorn's settings, shared by the command and the tests."""
    return uvicorn.Config(
        normal_requests(app),
        http=HeadDeadline,
        ws="none",  # the application has none
        log_level="warning",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        **options,
    )


def page_url(host: str, port: int) -> str:
    """URL of the page."""
    name = "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104 - not bound here
    return f"http://{joined_address(name, port)}/"
