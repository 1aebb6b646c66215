"""Calls without credentials, or without a request, keep nobody out."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import pytest
from websockets.asyncio.client import connect

import tiny
from moaspec_core.support import limits
from moaspec_core.support.tasks import RefusalDelay
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol.websocket_transport import SUBPROTOCOL, WebSocketTransport
from moaspec_edge.server.auth import CallAuth, Credentials
from moaspec_edge.server.listeners.admission import MAX_CALLS, Admission
from moaspec_edge.server.listeners.websocket_server import ServerOptions, TargetServer
from moaspec_edge.server.service import TargetService
from moaspec_edge.server.session_store import NoRoomError
from moaspec_edge.server.telemetry import Telemetry

TOKEN = "good"
GUARD = CallAuth(
    {hashlib.sha256(one.encode()).hexdigest(): name for one, name in ((TOKEN, "a"), ("b", "b"))}
)


def server() -> TargetServer:
    return TargetServer(TargetService(tiny.target()), ServerOptions(port=0, guard=GUARD))


async def described(at: TargetServer, token: str = TOKEN) -> pb.Description:
    """What a client with a token is told, over a connection of its own."""
    return await WebSocketTransport(at.url, Credentials(token=token)).describe()


@pytest.mark.slow
def test_one_token_cannot_take_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even with calls that never send their request; those end, too."""
    monkeypatch.setattr(limits, "MAX_REQUEST_S", 5)
    allow_open_files(2000)  # both ends of each connection are here

    async def run() -> None:
        async with server() as at, AsyncExitStack() as held:
            token = {"authorization": f"Bearer {TOKEN}"}
            silent = [
                await held.enter_async_context(
                    connect(
                        f"{at.url}/v1/describe",
                        subprotocols=[SUBPROTOCOL],
                        additional_headers=token,
                        open_timeout=None,
                        ping_interval=None,
                    )
                )
                for _ in range(300)
            ]
            assert (await described(at, "b")).protocol
            await asyncio.gather(*(one.wait_closed() for one in silent))
            assert {one.close_code for one in silent} == {1001, 1013}

    asyncio.run(run())


def allow_open_files(number: int) -> None:
    """Let this process open so many files; skips where the system does not."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != hard < number:
        pytest.skip(f"the system allows {hard} open files")
    if resource.RLIM_INFINITY != soft < number:
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))


def test_five_hundred_connections_keep_nobody_out() -> None:
    allow_open_files(2000)  # both ends of each connection are here

    async def run() -> None:
        async with server() as at:
            where = urlsplit(at.url)
            held = [await asyncio.open_connection(where.hostname, where.port) for _ in range(500)]
            for _, writer in held[::2]:
                writer.write(b"GET /v1/converse HTTP/1.1\r\n")
            assert (await described(at)).protocol
            for _, writer in held:
                writer.transport.abort()

    asyncio.run(run())


def test_one_address_cannot_take_all_calls() -> None:
    """Where there are no tokens."""

    async def run() -> None:
        admission = Admission(CallAuth(), Telemetry())
        async with AsyncExitStack() as held:

            async def call(address: str) -> None:
                await held.enter_async_context(admission.call(None, None, address))

            for address in ("192.0.2.1", "192.0.2.2"):
                for _ in range(MAX_CALLS // 2):
                    await call(address)
                with pytest.raises(NoRoomError, match=rf"{MAX_CALLS // 2} calls\b"):
                    await call(address)
            with pytest.raises(NoRoomError, match="all clients together"):
                await call("192.0.2.3")

    asyncio.run(run())


def test_wrong_tokens_are_answered_late_but_do_not_pile_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "WRONG_TOKEN_S", 3600.0)

    async def run() -> None:
        down = RefusalDelay()
        late = [asyncio.create_task(down.wait()) for _ in range(limits.MAX_WRONG_TOKENS)]
        await asyncio.sleep(0)
        await down.wait()
        assert not any(one.done() for one in late)
        for one in late:
            one.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        assert down._waiting == 0

    asyncio.run(run())
