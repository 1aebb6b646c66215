"""The transports that real servers and devices speak, for tests of both."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moaspec.backends.load import load_target
from moaspec.generation.drafters import load_drafter
from moaspec.remote.protocol.grpc_transport import GrpcTransport
from moaspec.remote.protocol.transport import ServerTransport
from moaspec.remote.protocol.websocket_transport import WebSocketTransport
from moaspec.remote.server.auth import Credentials
from moaspec.remote.server.listeners.grpc_server import GrpcServer, ServerOptions
from moaspec.remote.server.listeners.websocket_server import WebSocketOptions
from moaspec.remote.server.service import TargetService

KINDS = ("grpc", "websocket")


def listening(kind: str, *, tls: Any = None, **options: Any) -> ServerOptions:
    """Options of a server that this transport reaches."""
    host = options.get("host", "127.0.0.1")
    beside = WebSocketOptions(host=host, tls=tls) if kind == "websocket" else None
    return ServerOptions(port=0, websocket=beside, **options)


def reach(server: GrpcServer, kind: str, credentials: Credentials | None = None) -> ServerTransport:
    """The transport to a server."""
    if kind == "grpc":
        return GrpcTransport(server.address, credentials)
    assert server.websocket is not None
    return WebSocketTransport(server.websocket.url, credentials)


@contextmanager
def server_in_thread(directory: Path) -> Iterator[dict[str, str]]:
    """A server of `target` and `drafter` below a directory: what `--server` is for each kind."""
    found: dict[str, str] = {}
    ready, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        target = load_target(directory / "target")
        drafter = load_drafter(directory / "drafter", target=target)
        async with GrpcServer(TargetService(target, drafter), listening("websocket")) as server:
            assert server.websocket is not None
            found.update(grpc=server.address, websocket=server.websocket.url)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(60)
    yield found
    loop.call_soon_threadsafe(stop.set)
    thread.join(60)
    loop.close()
