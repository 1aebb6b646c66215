"""Sessions through a shaped transport: slow, lossy, overtaken, cut."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

import moaspec
import tiny
from moaspec_core.errors import LinkError, RefusedError
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.emulation import LinkProfile, ShapedTransport
from moaspec_edge.protocol.transport import Connection, InProcessTransport, pipe
from moaspec_edge.protocol.websocket_transport import WebSocketTransport
from moaspec_edge.server.listeners.websocket_server import ServerOptions, TargetServer
from moaspec_edge.server.service import TargetService
from simulated_time import run_simulated

PROMPT = tiny.PROMPTS[1]


def expected() -> list[int]:
    return moaspec.generate(tiny.target(), PROMPT, max_new_tokens=tiny.NEW_TOKENS).token_ids


def shaped(link: LinkProfile) -> tuple[RemoteSession, ShapedTransport]:
    target, drafter = tiny.target(), tiny.agreeing_drafter("llama")
    transport = ShapedTransport(InProcessTransport(TargetService(target, drafter)), link)
    options = RemoteOptions(draft=moaspec.Chain(3))
    return RemoteSession(LocalDevice(target, drafter), transport, options), transport


@pytest.mark.parametrize(
    "link",
    [
        LinkProfile(name="slow", delay_s=0.01, bits_per_s=2e6),
        LinkProfile(name="wild", delay_s=0.005, jitter_s=0.01, jitter="reorder"),
        LinkProfile(name="lossy", loss=0.1),
    ],
    ids=lambda one: one.name,
)
def test_the_text_is_the_same(link: LinkProfile) -> None:
    async def run() -> list[int]:
        session, _ = shaped(link)
        result = await session.generate(PROMPT, max_new_tokens=tiny.NEW_TOKENS)
        await session.close()
        return result.token_ids

    assert run_simulated(run()) == expected()


def test_a_cut_in_the_middle() -> None:
    async def run() -> tuple[list[int], int]:
        session, transport = shaped(LinkProfile(name="x", delay_s=0.002))
        text: list[int] = []
        async for event in session.stream(PROMPT, max_new_tokens=tiny.NEW_TOKENS):
            text[event.start :] = event.token_ids
            if len(text) > 5 and not session.stats.cuts:
                transport.faults.cut = True
            if session.stats.provisional > 3:
                transport.faults.cut = False
        await session.close()
        return text, session.stats.cuts

    text, cuts = run_simulated(run())
    assert text == expected()
    assert cuts >= 1


@pytest.mark.usefixtures("patient_link")
def test_a_real_connection_gets_one_message_at_a_time() -> None:
    """A connection takes one message at a time; a device's first two were sent at once."""

    async def run() -> None:
        service = TargetService(tiny.target(), tiny.agreeing_drafter("llama"))
        async with TargetServer(service, ServerOptions(port=0)) as server:
            transport = ShapedTransport(WebSocketTransport(server.url), LinkProfile(name="x"))
            device = LocalDevice(tiny.target(), tiny.agreeing_drafter("llama"))
            session = RemoteSession(device, transport)
            result = await session.generate(PROMPT, max_new_tokens=tiny.NEW_TOKENS)
            assert result.token_ids == expected()
            assert session.stats.cuts == 0
            await session.close()

    asyncio.run(run())


# The transport by itself


class Echo:
    """A server that sends back what it gets."""

    async def connect(self) -> Connection:
        near, far = pipe()
        self.task = asyncio.create_task(self._answer(far))
        return near

    async def _answer(self, far: Connection) -> None:
        try:
            while True:
                await far.send(await far.receive())
        except LinkError:
            pass


def exchanged(link: LinkProfile, *, num: int) -> list[bytes]:
    """The first `num` messages that come back of 20, and what follows them at once."""

    async def run() -> list[bytes]:
        connection = await ShapedTransport(Echo(), link).connect()
        for number in range(20):
            await connection.send(bytes([number]))
        found = [await connection.receive() for _ in range(num)]
        with contextlib.suppress(TimeoutError):
            while True:
                found.append(await asyncio.wait_for(connection.receive(), 0.1))
        await connection.close()
        return found

    return asyncio.run(run())


SENT = [bytes([number]) for number in range(20)]


def test_a_clean_link_keeps_order() -> None:
    assert exchanged(LinkProfile(name="x", delay_s=0.001), num=20) == SENT


def test_messages_overtake_one_another() -> None:
    found = exchanged(LinkProfile(name="x", jitter_s=0.02, jitter="reorder"), num=20)
    assert found != SENT
    assert sorted(found) == SENT


def test_messages_are_lost() -> None:
    assert len(exchanged(LinkProfile(name="x", loss=0.4), num=1)) < 20


def test_a_cut_link_says_nothing() -> None:
    async def run() -> None:
        transport = ShapedTransport(Echo(), LinkProfile(name="x"))
        connection = await transport.connect()
        transport.faults.cut = True
        await connection.send(b"lost")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(connection.receive(), 0.05)
        with pytest.raises(LinkError):
            await transport.connect()
        transport.faults.cut = False
        await connection.send(b"there")
        assert await connection.receive() == b"there"
        await connection.close()
        with pytest.raises(LinkError):
            await connection.receive()
        with pytest.raises(LinkError):
            await connection.send(b"")

    asyncio.run(run())


# Namespaces


@pytest.mark.slow
def test_a_link_between_namespaces(tmp_path: Path) -> None:
    import subprocess
    import sys

    from edge_bench.namespaces import EmulatedLink, missing

    if (reason := missing()) is not None:
        pytest.skip(f"links cannot be emulated here: {reason}")
    before = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    echo, ask = tmp_path / "echo.py", tmp_path / "ask.py"
    echo.write_text(
        "import socket\ns = socket.create_server(('10.77.0.2', 5000))\nprint(flush=True)\n"
        "while True:\n c, _ = s.accept()\n while d := c.recv(99):\n  c.sendall(d)\n"
    )
    ask.write_text(
        "import socket, sys, time\n"
        "c = socket.create_connection((sys.argv[1], 5000), float(sys.argv[2]))\n"
        "started = time.monotonic()\nc.sendall(b'x')\nc.recv(1)\n"
        "print(time.monotonic() - started)\n"
    )
    with EmulatedLink(LinkProfile(name="x", delay_s=0.05)) as link:
        asking = link.command("client", [sys.executable, str(ask), link.address, "60"])
        in_vain = [*asking[:-1], "0.5"]
        server = subprocess.Popen(
            link.command("server", [sys.executable, str(echo)]), stdout=subprocess.PIPE
        )
        assert server.stdout is not None
        server.stdout.readline()
        took = subprocess.run(asking, capture_output=True, text=True, check=True)
        # Twice 50 ms; a busy machine adds to it, nothing takes from it.
        assert float(took.stdout) >= 0.1
        link.cut()
        assert subprocess.run(in_vain, capture_output=True).returncode != 0
        link.mend()
        link.shape(LinkProfile(name="y"))
        assert subprocess.run(asking, capture_output=True).returncode == 0
        stats = link.stats()
        server.kill()
        server.wait()
        server.stdout.close()
    assert min(stats["packets"]) > 3
    assert max(stats["lost"]) > 0
    after = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert after == before


class Refusing:
    """A server that ends a connection for good: when it is read from, or when it is written to."""

    def __init__(self, *, when: str) -> None:
        self._when = when

    async def connect(self) -> Connection:
        return self

    async def send(self, frame: bytes) -> None:
        if self._when == "sent":
            raise RefusedError(f"{len(frame)} bytes are too many.")

    async def receive(self) -> bytes:
        if self._when == "read":
            raise RefusedError("The token has expired.")
        return await asyncio.Future()

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(("when", "why"), [("read", "expired"), ("sent", "too many")])
def test_a_refusal_reaches_whoever_receives(when: str, why: str) -> None:
    async def run() -> None:
        connection = await ShapedTransport(Refusing(when=when), LinkProfile(name="x")).connect()
        await connection.send(b"anything")
        with pytest.raises(RefusedError, match=why):
            async with asyncio.timeout(30):
                await connection.receive()
        await connection.close()

    asyncio.run(run())
