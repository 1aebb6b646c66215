"""The transports that real servers and devices speak, for tests of both."""

from __future__ import annotations

from typing import Any

from moaspec.remote.protocol.grpc_transport import GrpcTransport
from moaspec.remote.protocol.transport import ServerTransport
from moaspec.remote.protocol.websocket_transport import WebSocketTransport
from moaspec.remote.server.auth import Credentials
from moaspec.remote.server.grpc_server import GrpcServer, ServerOptions
from moaspec.remote.server.websocket_server import WebSocketOptions

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
