"""Addresses of WebSocket servers, and what answers there without being one."""

from __future__ import annotations

import asyncio

import pytest
from websockets.asyncio.server import ServerConnection, serve

import tiny
from lying_http import Lie, lying
from moaspec_core.errors import InputError, LinkError, MoaSpecError, RefusedError
from moaspec_core.support.limits import MAX_FRAME_BYTES
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.protocol.fleet import Fleet
from moaspec_edge.protocol.websocket_transport import SUBPROTOCOL, WebSocketTransport
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


async def told(address: str) -> str:
    """What a session with this server says in the end."""
    device = LocalDevice(tiny.target(), tiny.random_drafter(tiny.target()))
    options = RemoteOptions(on_cut="wait", give_up_s=1.5)
    session = RemoteSession(device, Fleet.at([address]), options)
    with pytest.raises(MoaSpecError) as caught:
        await session.generate(tiny.PROMPTS[0], max_new_tokens=2)
    await session.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("lie", "what"), [("page", "no `moaspec target-server`"), ("nothing", "cannot be reached")]
)
def test_a_session_names_what_is_no_server(lie: str, what: str) -> None:
    with lying(LIES[lie]) as url:
        address = url.replace("http", "ws")
        said = asyncio.run(told(address))
    assert address in said
    assert what in said


@pytest.mark.parametrize(
    ("frame", "what"),
    [
        (b"\xff" * 9, "Not a message"),
        (bytes(MAX_FRAME_BYTES + 1), "beyond"),
        (None, "says nothing"),
    ],
    ids=["noise", "long", "silence"],
)
def test_a_session_names_a_server_that_lies(frame: bytes | None, what: str) -> None:
    async def lie(connection: ServerConnection) -> None:
        if frame is not None:
            await connection.send(frame)
        await connection.wait_closed()

    async def run() -> None:
        async with serve(lie, "127.0.0.1", 0, subprotocols=[SUBPROTOCOL]) as server:
            address = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            said = await told(address)
        assert address in said
        assert what in said

    asyncio.run(run())


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
