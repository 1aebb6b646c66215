"""WebSockets: hostile clients and servers, credentials of browsers, health, links that fail."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Origin, Subprotocol

import moaspec
import tiny
from certificates import Authority
from links import Faults, FaultyTransport
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.errors import InputError, LinkError, RefusedError, WireError
from moaspec_core.support import limits
from moaspec_edge.device import link
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol.transport import Transport
from moaspec_edge.protocol.websocket_transport import (
    SUBPROTOCOL,
    WebSocketConnection,
    WebSocketTransport,
)
from moaspec_edge.server.auth import CallAuth, Credentials, server_tls
from moaspec_edge.server.listeners.websocket_server import ServerOptions, TargetServer
from moaspec_edge.server.service import ServiceOptions, TargetService

pytestmark = pytest.mark.usefixtures("patient_link")

PROMPT = tiny.PROMPTS[1]
NEW = tiny.NEW_TOKENS
PAGE = "https://example.org"
GUARD = CallAuth({hashlib.sha256(b"secret").hexdigest(): "alice"})


def service(**options: Any) -> TargetService:
    return TargetService(tiny.target(), tiny.agreeing_drafter("llama"), ServiceOptions(**options))


@contextlib.asynccontextmanager
async def listening(at: TargetService | None = None, **options: Any) -> AsyncIterator[TargetServer]:
    async with TargetServer(at or service(), ServerOptions(port=0, **options)) as server:
        yield server


def session(transport: Transport) -> RemoteSession:
    device = LocalDevice(tiny.target(), tiny.agreeing_drafter("llama"))
    return RemoteSession(device, transport, RemoteOptions(draft=Chain(2)))


# What clients send


def frame(opcode: int, payload: bytes = b"", *, first: int = 0x80, masked: bool = True) -> bytes:
    """A frame with a mask of zeros; `first` has the bits FIN, RSV1 to RSV3."""
    mask, size = 0x80 if masked else 0, len(payload)
    length = bytes([mask | size]) if size < 126 else bytes([mask | 127]) + size.to_bytes(8, "big")
    return bytes([first | opcode]) + length + bytes(4 if masked else 0) + payload


CONT, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
HUGE = bytes([0x80 | BINARY, 0x80 | 127]) + (1 << 40).to_bytes(8, "big") + bytes(4)
PART = bytes(1 << 19)
ATTACKS = {
    "huge frame": (HUGE, 1009),
    "many fragments": (
        frame(BINARY, PART, first=0) + frame(CONT, PART, first=0) * 8,
        1009,
    ),
    "no mask": (frame(BINARY, b"x", masked=False), 1002),
    "compressed, as a bomb would be": (frame(BINARY, b"x" * 100, first=0xC0), 1002),
    "unknown kind of frame": (frame(5), 1002),
    "continuation of nothing": (frame(CONT), 1002),
    "long ping": (frame(PING, bytes(126)), 1002),
    "noise": (frame(BINARY, b"\xff" * 50), 4400),
    "text": (frame(TEXT, "é is no frame".encode()), 4400),
    "no frame at all": (frame(BINARY), 4400),
    "pings": (frame(PING) * 20_000, None),
    "pongs": (frame(PONG) * 20_000, None),
    "empty fragments": (frame(BINARY, first=0) + frame(CONT, first=0) * 20_000, None),
}
"""What is sent after the handshake, and the close code; None: cut without one."""


@contextlib.asynccontextmanager
async def raw(
    url: str, path: str = "/v1/converse", *headers: str
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection after its handshake, as a client without a library has it."""
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    lines = [
        f"GET {path} HTTP/1.1",
        f"Host: {at.netloc}",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
        f"Sec-WebSocket-Protocol: {SUBPROTOCOL}",
        *headers,
    ]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    assert (await reader.readline()).startswith(b"HTTP/1.1 101")
    while await reader.readline() != b"\r\n":
        pass
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def close_code(reader: asyncio.StreamReader) -> int | None:
    """Read until the server has ended the connection; the code that it gave."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while True:
            first, size = await reader.readexactly(2)
            if size == 126:
                size = int.from_bytes(await reader.readexactly(2), "big")
            payload = await reader.readexactly(size)
            if first & 0xF == CLOSE:
                return int.from_bytes(payload[:2], "big")
    return None


@pytest.mark.parametrize("name", ATTACKS)
def test_hostile_frames_end_their_connection_and_no_other(name: str) -> None:
    sent, code = ATTACKS[name]

    async def run() -> None:
        at = service()
        async with listening(at) as listener:
            honest = session(WebSocketTransport(listener.url))
            reading = asyncio.create_task(honest.generate(PROMPT, max_new_tokens=NEW))
            async with raw(listener.url) as (reader, writer):
                writer.write(sent)
                async with asyncio.timeout(60):
                    assert await close_code(reader) == code
            assert (await reading).token_ids == list(tiny.own_texts("llama")[1])
            assert honest.stats.cuts == 0
            await honest.close()
            async with asyncio.timeout(60):
                while not all(one.is_closing() for one in listener._transports):
                    await asyncio.sleep(0.01)

    asyncio.run(run())


def test_a_message_that_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SILENCE_S", 0.3)

    async def run() -> None:
        async with listening() as listener, raw(listener.url) as (reader, one):
            one.write(frame(BINARY, bytes(100))[:20])
            async with asyncio.timeout(60):
                assert await close_code(reader) == 1001

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/v1/describe", "/v1/generate"])
def test_a_call_without_its_request_ends(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(limits, "MAX_REQUEST_S", 0.2)

    async def run() -> None:
        async with listening() as listener, raw(listener.url, path) as (reader, _):
            async with asyncio.timeout(60):
                assert await close_code(reader) == 1001

    asyncio.run(run())


@pytest.mark.parametrize("sent", [b"", b"GET /v1/converse HTTP/1.1\r\nHost: x\r\n"])
def test_a_handshake_that_never_ends_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(limits, "MAX_HANDSHAKE_S", 0.3)

    async def run() -> None:
        async with listening() as listener:
            at = urlsplit(listener.url)
            reader, writer = await asyncio.open_connection(at.hostname, at.port)
            writer.write(sent)
            with contextlib.suppress(ConnectionResetError):
                async with asyncio.timeout(60):
                    assert await reader.read() == b""
            writer.close()

    asyncio.run(run())


def test_a_handshake_without_end_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_HANDSHAKE_S", 3600)

    async def run() -> None:
        async with listening() as listener:
            at = urlsplit(listener.url)
            reader, writer = await asyncio.open_connection(at.hostname, at.port)
            writer.write(b"GET /v1/converse HTTP/1.1\r\n")
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(60):
                    for number in range(100):
                        writer.write(f"x{number}: {'y' * 4000}\r\n".encode())
                        await writer.drain()
                    assert await reader.read() == b""
            writer.transport.abort()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("limit", "encrypted"),
    [
        ("MAX_HTTP_CONNECTIONS_PER_ADDRESS", False),
        ("MAX_HTTP_CONNECTIONS_PER_ADDRESS", True),
        ("MAX_HTTP_CONNECTIONS", False),
    ],
)
def test_connections_are_limited(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, encrypted: bool
) -> None:
    """They count from the start, so those that never finish a TLS handshake count too."""
    monkeypatch.setattr(limits, limit, 3)
    tls = server_tls(*Authority(tmp_path, "ours").certificate("localhost")) if encrypted else None

    async def run() -> None:
        async with listening(tls=tls) as listener:
            at = urlsplit(listener.url)

            async def refused() -> bool:
                reader, writer = await asyncio.open_connection(at.hostname, at.port)
                try:
                    async with asyncio.timeout(0.3):
                        return await reader.read(1) == b""
                except ConnectionResetError:
                    return True
                except TimeoutError:
                    return False
                finally:
                    writer.transport.abort()

            held = [await asyncio.open_connection(at.hostname, at.port) for _ in range(3)]
            async with asyncio.timeout(60):
                while not await refused():
                    await asyncio.sleep(0.01)
            for _, writer in held:
                writer.transport.abort()
            async with asyncio.timeout(60):
                while await refused():
                    await asyncio.sleep(0.01)

    asyncio.run(run())


# Who may connect


async def described(url: str, **options: Any) -> pb.Description:
    """What a client of any kind is told."""
    options = {"subprotocols": [SUBPROTOCOL], **options}
    async with connect(f"{url}/v1/describe", **options) as opened:
        await opened.send(b"")
        return pb.Description.FromString(await opened.recv(decode=False))


def test_origins() -> None:
    async def run() -> None:
        async with listening(origins=(PAGE,)) as listener:
            assert (await described(listener.url)).protocol
            assert (await described(listener.url, origin=Origin(PAGE))).protocol
            for other in ("null", "http://example.org", f"{PAGE}.evil.net", listener.url):
                with pytest.raises(InvalidStatus) as refused:
                    await described(listener.url, origin=Origin(other))
                assert refused.value.response.status_code == 403

    asyncio.run(run())


@pytest.mark.parametrize("offered", [None, [], ["chat"], ["moaspec.v2"]])
def test_another_subprotocol(offered: list[str] | None) -> None:
    async def run() -> None:
        async with listening() as listener:
            names = None if offered is None else [Subprotocol(one) for one in offered]
            with pytest.raises(InvalidStatus) as refused:
                await described(listener.url, subprotocols=names or None)
            assert refused.value.response.status_code == 400

    asyncio.run(run())


def test_compression_is_not_agreed_on() -> None:
    async def run() -> None:
        async with (
            listening() as listener,
            connect(f"{listener.url}/v1/converse", subprotocols=[SUBPROTOCOL]) as opened,
        ):
            assert opened.request is not None
            assert "permessage-deflate" in opened.request.headers["Sec-WebSocket-Extensions"]
            assert opened.protocol.extensions == []

    asyncio.run(run())


def token_subprotocol(token: str) -> Subprotocol:
    """What a browser offers beside the protocol's name."""
    encoded = base64.urlsafe_b64encode(token.encode()).decode().rstrip("=")
    return Subprotocol(f"moaspec.token.{encoded}")


def test_tokens_of_browsers_and_programs() -> None:
    """In a header or a subprotocol; the answer names no token."""

    async def run() -> None:
        async with listening(guard=GUARD) as listener:
            transport = WebSocketTransport(listener.url, Credentials(token="secret"))
            assert (await transport.describe()).protocol
            offered = [SUBPROTOCOL, token_subprotocol("secret")]
            assert (await described(listener.url, subprotocols=offered)).protocol
            async with connect(f"{listener.url}/v1/describe", subprotocols=offered) as opened:
                assert opened.subprotocol == SUBPROTOCOL
            for wrong in ([], ["moaspec.token.%"], [token_subprotocol("guess")]):
                names = [SUBPROTOCOL, *map(Subprotocol, wrong)]
                with pytest.raises(ConnectionClosed) as refused:
                    await described(listener.url, subprotocols=names)
                assert refused.value.rcvd is not None
                assert refused.value.rcvd.code == 4401
                assert "does not know" in refused.value.rcvd.reason
            other = session(WebSocketTransport(listener.url, Credentials(token="guess")))
            with pytest.raises(RefusedError, match="does not know"):
                await other.generate(PROMPT, max_new_tokens=2)
            await other.close()
            with pytest.raises(InvalidStatus) as unknown:
                await connect(f"{listener.url}/v1/describe?token=secret")
            assert unknown.value.response.status_code == 404

    asyncio.run(run())


def test_wrong_tokens_are_answered_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WRONG_TOKEN_S", 0.5)

    async def run() -> None:
        async with listening(guard=GUARD) as listener:
            started = time.monotonic()
            with pytest.raises(RefusedError):
                await WebSocketTransport(listener.url, Credentials(token="x")).describe()
            assert time.monotonic() - started >= 0.5

    asyncio.run(run())


def test_health() -> None:
    async def run() -> None:
        at = service()
        async with listening(at) as listener, httpx.AsyncClient() as client:
            url = listener.url.replace("ws", "http", 1)
            well = await client.get(f"{url}/health")
            assert well.headers["access-control-allow-origin"] == "*"
            assert (well.status_code, well.text) == (200, "SERVING\n")
            assert "server" not in well.headers
            assert (await client.get(f"{url}/v1/nothing")).status_code == 404
            assert (await client.get(f"{url}/v1/describe")).status_code == 426
            at.draining = True
            assert (await client.get(f"{url}/health")).status_code == 503

    asyncio.run(run())


def test_a_client_that_says_nothing_does_not_hold_up_the_end() -> None:
    async def run() -> None:
        async with listening() as listener:
            at = urlsplit(listener.url)
            _, idle = await asyncio.open_connection(at.hostname, at.port)
            async with raw(listener.url):
                async with asyncio.timeout(60):
                    await listener.__aexit__()
            with pytest.raises(LinkError):
                await WebSocketTransport(listener.url).describe()
            idle.transport.abort()

    asyncio.run(run())


# Links that fail


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 5}])
def test_texts_over_links_that_break_are_equal(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "BACKOFF_S", 0.01)
    monkeypatch.setattr(link, "MAX_BACKOFF_S", 0.05)

    async def run() -> None:
        async with listening() as listener:
            faults = Faults(twice=0.1, delay_s=0.003, cut_after=(4, 6, 8, 10))
            transport = FaultyTransport(lambda: WebSocketTransport(listener.url), faults)
            remote = session(transport)
            text: list[int] = []
            async for event in remote.stream(PROMPT, max_new_tokens=NEW, **options):
                text[event.start :] = event.token_ids
            expected = moaspec.generate(tiny.target(), PROMPT, max_new_tokens=NEW, **options)
            assert text == expected.token_ids == remote.result.token_ids
            assert remote.stats.reconnects >= 2
            await remote.close()

    asyncio.run(run())


def test_a_connection_is_aborted_where_nobody_reads_its_end() -> None:
    class Deaf:
        aborted = False

        def __init__(self) -> None:
            self.transport = self

        async def close(self, *_: Any) -> None:
            await asyncio.sleep(3600)

        def abort(self) -> None:
            self.aborted = True

    deaf: Any = Deaf()
    asyncio.run(WebSocketConnection(deaf).close(timeout_s=0.01))
    assert deaf.aborted


# Servers that are none, or lie


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: ws://127.0.0.1:1/v1/describe\r\n", RefusedError),
        (b"HTTP/1.1 401 Unauthorized\r\n", RefusedError),
        (b"HTTP/1.1 200 OK\r\n", RefusedError),
        (b"HTTP/1.1 503 Service Unavailable\r\n", LinkError),
        (b"SSH-2.0-OpenSSH\r\n", LinkError),
        (b"", LinkError),
    ],
)
def test_what_answers_there_is_another_server(answer: bytes, error: type[Exception]) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer + b"Content-Length: 0\r\n\r\n" if answer else b"")
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(speak, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(error):
                await WebSocketTransport(f"ws://127.0.0.1:{port}").describe()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("agrees", "answer", "error"),
    [
        (False, b"", RefusedError),
        (True, b"\xff" * 9, WireError),
        (True, bytes(limits.MAX_FRAME_BYTES + 1), LinkError),
        (True, None, LinkError),
    ],
)
def test_lies_about_the_server(agrees: bool, answer: bytes | None, error: type[Exception]) -> None:
    async def lie(connection: Any) -> None:
        await connection.recv()
        if answer is not None:
            await connection.send(answer)

    async def run() -> None:
        names = [SUBPROTOCOL] if agrees else None
        async with serve(lie, "127.0.0.1", 0, subprotocols=names) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(error):
                await WebSocketTransport(f"ws://127.0.0.1:{port}").describe()

    asyncio.run(run())


def test_a_text_that_the_server_breaks_off_is_not_taken_for_whole() -> None:
    async def stop(connection: Any) -> None:
        await connection.recv()
        await connection.send(pb.Generated(token_ids=[1]).SerializeToString())
        await connection.close(1001)

    async def run() -> None:
        async with serve(stop, "127.0.0.1", 0, subprotocols=[SUBPROTOCOL]) as server:
            port = server.sockets[0].getsockname()[1]
            texts = WebSocketTransport(f"ws://127.0.0.1:{port}").generate(pb.GenerateRequest())
            with pytest.raises(LinkError, match="1001"):
                _ = [text async for text in texts]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("localhost:50051", "ws://HOST:PORT"),
        ("http://localhost:50051", "ws://HOST:PORT"),
        ("ws://", "ws://HOST:PORT"),
        ("ws://localhost:99999", "ws://HOST:PORT"),
        ("ws://localhost:1/?token=secret", "ws://HOST:PORT"),
        ("wss://alice:secret@example.org", "ws://HOST:PORT"),
        ("ws://example.org", "in the clear"),
    ],
)
def test_addresses_that_cannot_be(address: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        WebSocketTransport(address, Credentials(token="secret"))


def test_a_path_precedes_those_of_the_calls() -> None:
    assert WebSocketTransport("wss://example.org/prefix/").address == "wss://example.org/prefix"
