"""Running the application with uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from moaspec.errors import InputError
from moaspec.serve.app import create_app
from moaspec.serve.server_context import ServeSettings
from moaspec.serve.sources.source import TextSource
from moaspec.support import limits

LOOPBACK = ("127.0.0.1", "localhost", "::1")
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""The same as the `Host` header has them."""

HEAD_S = 30.0
"""A request's first line and headers must arrive within so long."""

GRACE_S = 5.0
"""Answers that are under way when the server is told to end may take so much longer."""

FAREWELL_S = 5.0
"""For the clients of those that take longer to hear of it."""


def serve(
    source: TextSource,
    settings: ServeSettings,
    *,
    host: str,
    listener: socket.socket,
    ready: Callable[[], None],
) -> None:
    """Serve until interrupted or terminated; see `Server` for how that ends.

    Args:
        source: decodes.
        settings: see `ServeSettings`; where only this machine can connect, foreign names in the
            `Host` header are refused too.
        host: address to listen on.
        listener: bound to it; closed at the end.
        ready: called once requests are answered.

    Raises:
        InputError: another program has begun to listen there.
    """
    if host in LOOPBACK and not settings.guarded.hosts:
        settings = replace(settings, guarded=replace(settings.guarded, hosts=LOOPBACK_HOSTS))
    server = Server(config(create_app(source, settings)), source, ready=ready)
    # Uvicorn repeats the signal that ended it; both are a proper end.
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


class HeadDeadline(H11Protocol):
    """Uvicorn's protocol, which closes connections on which no whole request arrives.

    Such connections would count among `MAX_HTTP_CONNECTIONS` for ever. And of one
    address there may be a part of these only.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        super().connection_made(transport)
        if self._same_address() > limits.MAX_HTTP_CONNECTIONS_PER_ADDRESS:
            transport.abort()
            return
        self._watch()

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._stop()
        super().connection_lost(exc)

    def _same_address(self) -> int:
        """Connections of this one's address."""
        if self.client is None:
            return 1
        clients = [getattr(one, "client", None) for one in self.connections]
        return sum(client is not None and client[0] == self.client[0] for client in clients)

    def _watch(self) -> None:
        """The clock runs from the connection's, or a head's, first byte to the head's last."""
        awaited = self.cycle is None or self.cycle.response_complete
        if not awaited:
            self._stop()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_S, self.timeout_keep_alive_handler)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Server(uvicorn.Server):
    """Uvicorn's server, which lets answers end before it ends itself.

    Args:
        settings: of uvicorn.
        source: decodes; closed when the time is up, so that whoever still listens hears why.
        grace_s: how long answers that are under way may take.
        ready: called once requests are answered.
    """

    def __init__(
        self,
        settings: uvicorn.Config,
        source: TextSource,
        grace_s: float = GRACE_S,
        *,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        settings.timeout_graceful_shutdown = round(grace_s + FAREWELL_S)
        super().__init__(settings)
        self._source, self._grace_s, self._ready = source, grace_s, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        ending = asyncio.create_task(self._end())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end(self) -> None:
        await asyncio.sleep(self._grace_s)
        await self._source.close()


def config(app: Any, **options: Any) -> uvicorn.Config:
    """Uvicorn's settings, the same for users and tests."""
    return uvicorn.Config(
        app,
        http=HeadDeadline,
        log_level="warning",
        server_header=False,
        limit_concurrency=limits.MAX_HTTP_CONNECTIONS,
        timeout_keep_alive=30,
        **options,
    )


def page_url(host: str, port: int) -> str:
    """Where a browser finds the page."""
    name = "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104 - not bound here
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/"
