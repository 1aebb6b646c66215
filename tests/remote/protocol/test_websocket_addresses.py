"""Addresses of WebSocket servers, and what answers there without being one."""

from __future__ import annotations

import asyncio

import pytest

from lying_http import Lie, lying
from moaspec_core.errors import InputError, LinkError, RefusedError
from moaspec_edge.protocol.websocket_transport import WebSocketTransport
from moaspec_edge.server.auth import Credentials

SWITCH = b"HTTP/1.1 101 X\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
LIES: dict[str, Lie] = {
    "nothing": lambda _: [],
    "no HTTP": lambda _: [b"SSH-2.0\r\n\r\n"],
    "page": lambda _: [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"],
    "redirect": lambda _: [b"HTTP/1.1 302 X\r\nLocation: ws://h/\r\nContent-Length: 0\r\n\r\n"],
    "no key": lambda _: [SWITCH + b"\r\n"],
    "status": lambda _: [b"HTTP/1.1 999 X\r\nContent-Length: 0\r\n\r\n"],
    "length": lambda _: [b"HTTP/1.1 500 X\r\nContent-Length: -5\r\n\r\n"],
    "bytes": lambda _: [b"HTTP/1.1 101 X\r\nX-\xff: \xff\r\n\r\n"],
}


@pytest.mark.parametrize("lie", LIES)
def test_what_is_no_target_server(lie: str) -> None:
    with lying(LIES[lie]) as url, pytest.raises((LinkError, RefusedError), match=r"server"):
        asyncio.run(WebSocketTransport(url.replace("http", "ws"), Credentials()).connect())


@pytest.mark.parametrize(
    "address",
    [
        *("ws://[::1", "ws://h:99999", "ws://h:x", "ws:///x", "http://h", "h:1"),
        *("ws://a..b:1", f"ws://{'a' * 64}.example:1", "ws://u@h:1", "ws://h/?a"),
    ],
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(InputError, match="ws://HOST:PORT"):
        WebSocketTransport(address, Credentials())
