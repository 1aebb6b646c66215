"""Devices, networks and clocks that fail: the others go on, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

import tiny
from fleet_sim.simulation import SkippingLoop
from links import FaultyTransport, Restartable
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.errors import InputError, LinkError, RefusedError
from moaspec_core.support import limits
from moaspec_edge.device.link import DEAD_AFTER_S
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.protocol import identity, wire
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol.transport import Connection, InProcessTransport, Transport, pipe
from moaspec_edge.protocol.websocket_transport import WebSocketConnection, WebSocketTransport
from moaspec_edge.server.auth import CallAuth, Credentials
from moaspec_edge.server.listeners.websocket_server import ServerOptions, TargetServer
from moaspec_edge.server.service import ServiceOptions, TargetService
from moaspec_edge.server.session_store import NoRoomError, StoreOptions
from simulated_time import run_simulated

PROMPT = tiny.PROMPTS[1]
NEW = tiny.NEW_TOKENS
NAME = bytes(16)


def service(**options: Any) -> TargetService:
    return TargetService(tiny.target(), tiny.agreeing_drafter("llama"), ServiceOptions(**options))


def session(transport: Transport, **options: Any) -> RemoteSession:
    device = LocalDevice(tiny.target(), tiny.agreeing_drafter("llama"))
    return RemoteSession(device, transport, RemoteOptions(draft=Chain(2), **options))


def opening(token_ids: list[int], grammar: str = "") -> bytes:
    """The first frame of a device that wants no activations."""
    asked = pb.Open(
        protocol=identity.PROTOCOL,
        sampling_version=identity.SAMPLING_VERSION,
        target=identity.to_message(tiny.target().identity),
        sampling=pb.Sampling(top_p=1.0, repetition_penalty=1.0, grammar=grammar),
        token_ids=token_ids,
        prompt_length=len(token_ids),
    )
    return pb.ClientMessage(session=NAME, turn=1, open=asked).SerializeToString()


HEARTBEAT = pb.ClientMessage(session=NAME, heartbeat=pb.Heartbeat(number=1)).SerializeToString()


async def told(connection: Connection) -> pb.ServerMessage:
    return wire.parse(await connection.receive(), pb.ServerMessage())


def beside(attack: Callable[[TargetService, Connection, Connection], Awaitable[None]]) -> None:
    """Attack a service over a pipe, with an honest session beside it; then nothing is left."""

    async def run() -> None:
        at = service(sessions=StoreOptions(idle_s=0.0))
        honest = session(InProcessTransport(at, "alice"))
        attacking = asyncio.create_task(attacked(at))
        result = await honest.generate(PROMPT, max_new_tokens=NEW)
        assert result.token_ids == list(tiny.own_texts("llama")[1])
        await attacking
        await honest.close()
        while len(at.sessions):
            at.sessions.sweep()
            await asyncio.sleep(0.01)
        assert at.verifier.cache.num_bytes == 0
        assert at.shared.num_rows == 0
        await at.stop()

    async def attacked(at: TargetService) -> None:
        near, far = pipe()
        await attack(at, near, far)
        await near.close()

    run_simulated(run())


def test_a_flood_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # A pass of the honest session must not look like a flood: it sends three messages per round.
    monkeypatch.setattr(limits, "MAX_MESSAGES_PER_S", 20.0)
    monkeypatch.setattr("moaspec_edge.server.session_store.BURST_S", 20.0)

    async def flood(at: TargetService, near: Connection, far: Connection) -> None:
        async def send() -> None:
            with contextlib.suppress(LinkError):
                while True:
                    await near.send(HEARTBEAT)
                    await near.receive()

        sending = asyncio.create_task(send())
        with pytest.raises(RefusedError, match="20 messages a second"):
            await at.converse("mallory", far)
        await near.close()
        await sending

    beside(flood)


def test_a_device_that_never_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_MESSAGES_PER_S", 1e6)

    async def deaf(at: TargetService, near: Connection, far: Connection) -> None:
        async def send() -> None:
            await near.send(opening([1, 2, 3]))
            with contextlib.suppress(LinkError):
                while True:
                    await near.send(HEARTBEAT)

        sending = asyncio.create_task(send())
        with pytest.raises(LinkError, match="does not read"):
            await at.converse("mallory", far)
        await near.close()
        await sending

    beside(deaf)


def test_a_device_that_reads_nothing_for_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SEND_S", 5.0)  # before its silence counts

    class Full:
        """A connection whose other side has stopped reading."""

        async def send(self, _: bytes) -> None:
            await asyncio.sleep(3600)

        async def receive(self) -> bytes:
            return HEARTBEAT if self.asks() else await asyncio.sleep(3600, b"")

        def __init__(self) -> None:
            self.asked = 0

        def asks(self) -> bool:
            self.asked += 1
            return self.asked == 1

        async def close(self) -> None: ...

    async def run() -> None:
        at = service()
        with pytest.raises(LinkError, match="read nothing for 5 s"):
            await at.converse("mallory", Full())
        await at.stop()

    run_simulated(run())


def test_a_half_open_connection_is_closed() -> None:
    """The device is gone, and nobody said so."""

    async def vanish(at: TargetService, near: Connection, far: Connection) -> None:
        await near.send(opening([1, 2, 3]))
        with pytest.raises(LinkError, match="said nothing for 10 s"):
            await at.converse("mallory", far)

    beside(vanish)


def test_connections_of_one_owner_are_limited() -> None:
    async def run() -> None:
        at = service(sessions=StoreOptions(max_sessions_per_owner=1))
        ends = [pipe() for _ in range(2)]
        serving = [asyncio.create_task(at.converse("mallory", far)) for _, far in ends]
        await asyncio.sleep(0)
        with pytest.raises(NoRoomError, match="2 connections"):
            await at.converse("mallory", pipe()[1])
        for near, _ in ends:
            await near.close()
        await asyncio.gather(*serving, return_exceptions=True)
        remote = session(InProcessTransport(at, "mallory"))
        assert len((await remote.generate(PROMPT, max_new_tokens=3)).token_ids) == 3
        await remote.close()
        await at.stop()

    run_simulated(run())


@pytest.mark.slow
def test_a_server_that_stops_tells_devices() -> None:
    """They connect again, which behind a balancer leads to another server."""

    async def run() -> None:
        at = Restartable(service)
        transport = FaultyTransport(at.transport)
        remote = session(transport)
        async for _ in remote.stream(PROMPT, max_new_tokens=NEW):
            if not at.service.draining:
                await at.service.drain(1.0)
        # What had begun came to its end.
        assert remote.result.token_ids == list(tiny.own_texts("llama")[1])
        while transport.connections < 2:
            await asyncio.sleep(0.01)
        await at.restart()
        result = await remote.generate(PROMPT, max_new_tokens=NEW)
        assert result.token_ids == list(tiny.own_texts("llama")[1])
        await remote.close()
        await at.service.stop()

    run_simulated(run())


@pytest.mark.usefixtures("patient_link")
def test_clocks_may_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of day is used for nothing but the expiry of tokens."""
    real, year_s = time.time, 3e7
    jumps = iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: real() + year_s * (next(jumps) % 3 - 1))

    async def run() -> None:
        async with TargetServer(service(), ServerOptions(port=0)) as server:
            remote = session(WebSocketTransport(server.url))
            result = await remote.generate(PROMPT, max_new_tokens=NEW)
            assert result.token_ids == list(tiny.own_texts("llama")[1])
            assert remote.stats.cuts == 0
            await remote.close()

    asyncio.run(run())


def test_a_device_that_stood_still_does_not_blame_the_link() -> None:
    async def run() -> None:
        at = service()
        remote = session(InProcessTransport(at))
        loop = cast(SkippingLoop, asyncio.get_running_loop())
        async for _ in remote.stream(PROMPT, max_new_tokens=NEW):
            loop.stand_still(2 * DEAD_AFTER_S)
        assert remote.result.token_ids == list(tiny.own_texts("llama")[1])
        assert remote.stats.cuts == 0
        await remote.close()
        await at.stop()

    run_simulated(run())


@pytest.mark.usefixtures("patient_link")
@pytest.mark.slow
def test_a_token_that_expires_ends_with_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_CONNECTION_S", 1.0)

    async def turns_without_end(remote: RemoteSession) -> None:
        while True:
            await remote.generate(PROMPT, max_new_tokens=NEW)

    async def run() -> None:
        until: dict[str, float] = {}
        guard = CallAuth({hashlib.sha256(b"secret").hexdigest(): "alice"}, until)
        options = ServerOptions(port=0, guard=guard)
        async with TargetServer(service(), options) as server:
            transport = WebSocketTransport(server.url, Credentials(token="secret"))
            remote = session(transport, on_cut="wait")
            await remote.generate(PROMPT, max_new_tokens=3)
            until["alice"] = 0.0
            with pytest.raises(RefusedError, match="expired"):
                await turns_without_end(remote)
            await remote.close()

    asyncio.run(run())


def test_a_guard_without_tokens_lets_nobody_in() -> None:
    assert CallAuth().owner(None, None) == "anonymous"
    with pytest.raises(RefusedError, match="does not know"):
        CallAuth({}).owner("secret", None)
    with pytest.raises(RefusedError, match="does not know"):
        CallAuth({"Ausweis für Ada": "ada"}).owner("sécret", None)


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ({}, "holds no token"),
        ({"alice": {"sha256": "secret"}}, "alice.sha256: String should match"),
        ({"bob": {"sha256": 64 * "é"}}, "bob.sha256: String should match"),
        ({"eve": {"sha256": 64 * "0", "max_sessions": 0}}, "eve.max_sessions: .* greater than 0"),
        ({"eve": {"sha256": 64 * "0", "max_sessions": 1e999}}, "eve.max_sessions: .* integer"),
        ({"eve": {"sha256": 64 * "0", "expires": float("nan")}}, "eve.expires: .* finite"),
        ({"eve": {"sha256": 64 * "0", "expires": 10**400}}, "eve.expires: .* number"),
        ({"eve": {"sha256": 64 * "0", "expiry": 5}}, "eve.expiry: Extra inputs"),
        ({"eve": {"sha256": 64 * "a"}, "ida": {"sha256": 64 * "A"}}, "same token for several"),
    ],
)
def test_a_file_of_tokens_that_guards_nothing(tmp_path: Path, entries: Any, why: str) -> None:
    (tmp_path / "tokens.json").write_text(json.dumps(entries))
    with pytest.raises(InputError, match=why):
        CallAuth.read(tmp_path / "tokens.json")


def test_a_file_of_tokens_that_names_an_owner_twice(tmp_path: Path) -> None:
    entry = json.dumps({"sha256": 64 * "0"})
    (tmp_path / "tokens.json").write_text(f'{{"eve": {entry}, "eve": {entry}}}')
    with pytest.raises(InputError, match="'eve' occurs twice"):
        CallAuth.read(tmp_path / "tokens.json")


def test_a_file_of_tokens_that_is_too_deep(tmp_path: Path) -> None:
    (tmp_path / "tokens.json").write_text("[" * 99_999)
    with pytest.raises(InputError, match="must hold"):
        CallAuth.read(tmp_path / "tokens.json")


class Padded(WebSocketTransport):
    """Lengthens the messages that it sends."""

    def __init__(self, url: str, num_bytes: int) -> None:
        super().__init__(url)
        self.num_bytes = num_bytes

    async def connect(self) -> WebSocketConnection:
        connection = await super().connect()
        send = connection.send
        connection.send = lambda frame: send(frame.ljust(self.num_bytes))  # type: ignore[method-assign]
        return connection


@pytest.mark.usefixtures("patient_link")
@pytest.mark.parametrize(
    ("num_bytes", "why"),
    [
        (limits.MAX_FRAME_BYTES + 1, "A message of 4194305 bytes is larger than the largest"),
        (limits.MAX_FRAME_BYTES, "The server refuses: .*4194304"),
    ],
)
def test_an_oversized_message_ends_its_session_and_no_other(num_bytes: int, why: str) -> None:
    """Its device does not send it, or the server does not read it; none tries again."""

    async def run() -> None:
        async with TargetServer(service(), ServerOptions(port=0)) as server:
            assert server.service.capabilities.limits.max_bytes < limits.MAX_FRAME_BYTES
            honest = session(WebSocketTransport(server.url))
            await honest.generate(PROMPT, max_new_tokens=3)
            large = session(Padded(server.url, num_bytes))
            with pytest.raises(RefusedError, match=why):
                await large.generate(PROMPT, max_new_tokens=3)
            assert large.stats.reconnects == 0
            await large.close()
            result = await honest.generate(PROMPT, max_new_tokens=NEW)
            assert result.token_ids == list(tiny.own_texts("llama")[1])
            assert honest.stats.cuts == 0
            await honest.close()

    asyncio.run(run())


def test_a_grammar_is_compiled_beside_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take seconds, and links count as dead after less than one."""
    compile_now = threading.Event()

    class Slow:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def prepare(self) -> None: ...

        def compiled(self, *_: Any) -> None:
            compile_now.wait(60)
            raise InputError("The grammar cannot be used.")

    monkeypatch.setattr("moaspec_core.sampling.grammar.Grammars", Slow)

    async def run() -> None:
        at = service()
        near, far = pipe()
        serving = asyncio.create_task(at.converse("alice", far))
        await near.send(opening([1, 2, 3], grammar="start: /x/"))
        await near.send(HEARTBEAT)
        assert (await told(near)).HasField("heartbeat")
        compile_now.set()
        assert "grammar" in (await told(near)).problem.message
        await near.close()
        await asyncio.gather(serving, return_exceptions=True)
        assert not len(at.sessions)
        await at.stop()

    asyncio.run(run())
