"""The service on a real network: TLS, tokens, metrics, sessions, draining."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

import moaspec
import tiny
from certificates import Authority
from moaspec.model.checkpoint.moa_checkpoint import fingerprint
from moaspec_core.drafting.protocols import VerifyRequest, VerifyResult
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.errors import InputError, LinkError, RefusedError
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.device.server_text import RemoteText
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol.transport import Transport
from moaspec_edge.protocol.websocket_transport import WebSocketTransport
from moaspec_edge.server.auth import CallAuth, Credentials, server_tls
from moaspec_edge.server.listeners.websocket_server import ServerOptions, TargetServer
from moaspec_edge.server.service import ServiceOptions, TargetService
from moaspec_edge.server.session_store import StoreOptions
from moaspec_edge.server.shared_verifier import PassOptions

pytestmark = pytest.mark.usefixtures("patient_link")

PROMPT = tiny.PROMPTS[1]
NEW = tiny.NEW_TOKENS


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), "ours")


@pytest.fixture
def service() -> TargetService:
    return TargetService(tiny.target(), tiny.agreeing_drafter("llama"))


def session(transport: Transport, **options: Any) -> RemoteSession:
    device = LocalDevice(tiny.target(), tiny.agreeing_drafter("llama"))
    return RemoteSession(device, transport, RemoteOptions(**options))


def test_text_description_and_metrics(service: TargetService) -> None:
    async def run() -> None:
        async with TargetServer(service, ServerOptions(port=0)) as server:
            transport = WebSocketTransport(server.url)
            described = await transport.describe()
            assert described.drafter == fingerprint(tiny.agreeing_drafter("llama"))
            assert described.max_tokens == tiny.target().max_positions
            remote = session(transport)
            result = await remote.generate(PROMPT, max_new_tokens=NEW)
            assert result.token_ids == list(tiny.own_texts("llama")[1])
            async with asyncio.timeout(60):  # a heartbeat may be under way
                while (
                    f'moaspec_bytes_total{{direction="in"}} {float(remote.stats.bytes_up)}'
                    not in (told := generate_latest(service.observer.registry).decode())
                ):
                    await asyncio.sleep(0.01)
            assert "moaspec_sessions 1.0" in told
            await remote.close()
            await server.drain(2.0)

    asyncio.run(run())


@pytest.mark.parametrize("speculate", [False, True])
def test_the_server_alone(service: TargetService, speculate: bool) -> None:
    async def run() -> None:
        async with TargetServer(service, ServerOptions(port=0)) as server:
            text = RemoteText(WebSocketTransport(server.url))
            options: dict[str, Any] = {"max_new_tokens": NEW, "temperature": 0.8, "seed": 2}
            events = [e async for e in text.stream(PROMPT, speculate=speculate, **options)]
            expected = moaspec.generate(tiny.target(), PROMPT, **options)
            assert [token for event in events for token in event.token_ids] == expected.token_ids
            assert events[-1].stop_reason == "max_new_tokens"
            greedy = [e async for e in text.stream(PROMPT, speculate=speculate, max_new_tokens=NEW)]
            sources = [source for event in greedy for source in event.sources]
            assert ("draft" in sources) is speculate
            with pytest.raises(RefusedError, match="vocabulary"):
                _ = [e async for e in text.stream([tiny.VOCAB])]
        assert service.shared.num_rows == 0

    asyncio.run(run())


def test_the_server_alone_drafts_nothing_for_reused_layers() -> None:
    drafter = tiny.random_drafter(tiny.target(), exits=(1, 2))

    async def run() -> None:
        async with TargetServer(
            TargetService(tiny.target(), drafter), ServerOptions(port=0)
        ) as server:
            text = RemoteText(WebSocketTransport(server.url))
            events = [e async for e in text.stream(PROMPT, speculate=True, max_new_tokens=NEW)]
        expected = moaspec.generate(tiny.target(), PROMPT, max_new_tokens=NEW)
        assert [token for event in events for token in event.token_ids] == expected.token_ids
        assert {source for event in events for source in event.sources} == {"target"}

    asyncio.run(run())


@pytest.mark.slow
def test_tls_and_tokens(service: TargetService, authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    names = {"alice": "secret-a", "bob": "secret-b"}
    entries = {n: {"sha256": hashlib.sha256(t.encode()).hexdigest()} for n, t in names.items()}
    entries["bob"]["expires"] = time.time() - 1  # type: ignore[assignment]
    (tmp_path / "tokens.json").write_text(json.dumps(entries))

    async def run() -> None:
        files: Any = (*authority.certificate("localhost"), authority.ca)
        where = ServerOptions(
            host="localhost",
            port=0,
            tls=server_tls(*files),
            guard=CallAuth.read(tmp_path / "tokens.json"),
        )
        certificate, key = authority.certificate("device")
        own: dict[str, Any] = {"ca": authority.ca, "certificate": certificate, "key": key}
        async with TargetServer(service, where) as server:
            remote = session(WebSocketTransport(server.url, Credentials(token="secret-a", **own)))
            result = await remote.generate(PROMPT, max_new_tokens=NEW)
            assert result.token_ids == list(tiny.own_texts("llama")[1])
            assert [one.owner for one in service.sessions] == ["alice"]
            await remote.close()
            for token, why in (("secret-b", "expired"), ("guess", "does not know"), (None, "No t")):
                refused = session(WebSocketTransport(server.url, Credentials(token=token, **own)))
                with pytest.raises(RefusedError, match=why):
                    await refused.generate(PROMPT, max_new_tokens=2)
                await refused.close()
            for credentials, error, give_up_s in (
                (Credentials(token="secret-a", **(own | {"ca": other.ca})), RefusedError, 60.0),
                (Credentials(token="secret-a", ca=authority.ca), LinkError, 1.0),
                # Without a CA: those of this system.
                (Credentials(token="secret-a"), RefusedError, 60.0),
            ):
                stranger = session(WebSocketTransport(server.url, credentials), give_up_s=give_up_s)
                with pytest.raises(error):
                    await stranger.generate(PROMPT, max_new_tokens=2)
                await stranger.close()

    asyncio.run(run())


@pytest.mark.slow
def test_draining_ends_work_and_refuses_more(service: TargetService) -> None:
    async def run() -> None:
        async with TargetServer(service, ServerOptions(port=0)) as server:
            transport = WebSocketTransport(server.url)
            remote = session(transport, draft=Chain(1), give_up_s=3.0, on_cut="wait")
            got: list[int] = []

            async def read() -> None:
                async for event in remote.stream(PROMPT, max_new_tokens=NEW):
                    got[event.start :] = event.token_ids
                    if len(got) >= 5 and not service.draining:
                        await server.drain(2.0)

            # Whether the text is done before the server is gone is a matter of time.
            with contextlib.suppress(LinkError):
                await read()
            assert len(got) >= 5
            assert got == list(tiny.own_texts("llama")[1])[: len(got)]
            with pytest.raises(LinkError):
                await remote.generate([1, 2, 3], max_new_tokens=2)
            await remote.close()
            with pytest.raises(LinkError):
                await transport.describe()

    asyncio.run(run())


async def taken(transport: WebSocketTransport) -> bool:
    """Whether a server takes another call."""
    try:
        await transport.describe()
    except LinkError:
        return False
    return True


def test_connections_end_by_themselves_while_a_server_drains(service: TargetService) -> None:
    """A device's last rounds are answered; no other device is let in."""
    beat = pb.ClientMessage(session=bytes(16), heartbeat=pb.Heartbeat()).SerializeToString()

    async def run() -> None:
        async with TargetServer(service, ServerOptions(port=0)) as server:
            transport = WebSocketTransport(server.url)
            connection = await transport.connect()
            draining = asyncio.create_task(server.drain(600.0))
            while await taken(transport):
                await asyncio.sleep(0.01)
            await connection.send(beat)
            assert await connection.receive()
            assert not draining.done()
            await connection.close()
            async with asyncio.timeout(60):
                await draining

    asyncio.run(run())


@pytest.mark.slow
def test_no_room_is_waited_for() -> None:
    """One session at a time: the second waits until the first is closed."""
    options = ServiceOptions(sessions=StoreOptions(max_sessions=1))
    service = TargetService(tiny.target(), tiny.agreeing_drafter("llama"), options)

    async def run() -> None:
        async with TargetServer(service, ServerOptions(port=0)) as server:
            transport = WebSocketTransport(server.url)
            first, second = session(transport), session(transport)
            await first.generate(PROMPT, max_new_tokens=3)
            waiting = asyncio.create_task(second.generate(PROMPT, max_new_tokens=NEW))
            await asyncio.sleep(0.3)
            assert not waiting.done()
            await first.close()
            assert (await waiting).token_ids == list(tiny.own_texts("llama")[1])
            await second.close()

    asyncio.run(run())


def test_idle_sessions_make_room_and_come_back() -> None:
    """An evicted session is opened anew from its token ids, which costs time and nothing else."""
    limits = StoreOptions(max_sessions=1, idle_s=0.0)
    service = TargetService(
        tiny.target(), tiny.agreeing_drafter("llama"), ServiceOptions(sessions=limits)
    )

    async def run() -> None:
        async with TargetServer(service, ServerOptions(port=0)) as server:
            transport = WebSocketTransport(server.url)
            remote = session(transport)
            first = await remote.generate(PROMPT, max_new_tokens=6)
            (held,) = service.sessions
            service.sessions.remove(held)
            longer = [*PROMPT, *first.token_ids, 3]
            again = await remote.generate(longer, max_new_tokens=6)
            expected = moaspec.generate(tiny.target(), longer, max_new_tokens=6)
            assert again.token_ids == expected.token_ids
            await remote.close()
            while len(service.sessions):
                service.sessions.sweep()
                await asyncio.sleep(0.05)
            assert service.verifier.cache.num_bytes == 0

    asyncio.run(run())


@pytest.mark.slow
def test_idle_devices_make_room_though_they_stay_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More devices than sessions, none of which ever hangs up: each has its turn."""
    monkeypatch.setattr("moaspec_edge.server.session_store.CONNECTED_BUSY_S", 0.1)
    limits = StoreOptions(max_sessions=1)
    service = TargetService(
        tiny.target(), tiny.agreeing_drafter("llama"), ServiceOptions(sessions=limits)
    )
    own = list(tiny.own_texts("llama")[1])

    async def run() -> None:
        async with TargetServer(service, ServerOptions(port=0)) as server:
            transport = WebSocketTransport(server.url)
            devices = [session(transport) for _ in range(3)]
            for _ in range(2):
                for device in devices:
                    result = await device.generate(PROMPT, max_new_tokens=NEW)
                    assert result.token_ids == own
                    assert len(service.sessions) == 1
            assert service.sessions.evicted == 5
            assert {device.stats.state for device in devices} == {"up"}
            for device in devices:
                await device.close()
        assert service.verifier.cache.num_bytes == 0

    asyncio.run(run())


def test_a_session_at_work_is_not_evicted_for_an_idle_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device that comes back after long makes room for nobody while its pass runs."""
    options = ServiceOptions(sessions=StoreOptions(max_sessions=2))
    monkeypatch.setattr("moaspec_edge.server.session_store.CONNECTED_BUSY_S", 0.0)
    service = TargetService(tiny.target(), tiny.agreeing_drafter("llama"), options)
    may_decide, decide = threading.Event(), service.shared._decide

    def decide_when_told(requests: list[VerifyRequest]) -> list[VerifyResult | Exception]:
        assert may_decide.wait(300)
        return decide(requests)

    monkeypatch.setattr(service.shared, "_decide", decide_when_told)
    may_decide.set()

    async def run() -> None:
        async with TargetServer(service, ServerOptions(port=0)) as server:
            transport = WebSocketTransport(server.url)
            old, idle, new = (session(transport) for _ in range(3))
            await old.generate(PROMPT, max_new_tokens=1)
            await idle.generate(PROMPT, max_new_tokens=1)
            (first, second) = service.sessions
            may_decide.clear()
            working = asyncio.create_task(old.generate([*PROMPT, 3], max_new_tokens=2))
            while first.task is None:
                await asyncio.sleep(0.01)
            asking = asyncio.create_task(new.generate(PROMPT, max_new_tokens=1))
            while not service.sessions.evicted:
                await asyncio.sleep(0.01)
            held = list(service.sessions)
            assert first in held
            assert second not in held
            may_decide.set()
            await asyncio.gather(working, asking)
            assert service.sessions.evicted == 1
            for device in (old, idle, new):
                await device.close()

    asyncio.run(run())


@pytest.mark.slow
def test_texts_of_the_server_alone_count_end_and_leave_nothing() -> None:
    options = ServiceOptions(
        sessions=StoreOptions(max_sessions=1), passes=PassOptions(min_pass_s=0.05)
    )
    service = TargetService(tiny.target(), tiny.agreeing_drafter("llama"), options)
    own = list(tiny.own_texts("llama")[1])

    async def run() -> None:
        async with TargetServer(service, ServerOptions(port=0)) as server:
            transport = WebSocketTransport(server.url)
            text: list[int] = []

            async def read() -> None:
                stops = tiny.target().stop_token_ids
                async for event in RemoteText(transport, stops).stream(PROMPT, max_new_tokens=NEW):
                    text.extend(event.token_ids)

            reading = asyncio.create_task(read())
            while not text:
                await asyncio.sleep(0.01)
            # No room for a session beside it, and a server that stops waits for its end.
            waiting = session(transport)
            asked = asyncio.create_task(waiting.generate(PROMPT, max_new_tokens=1))
            await asyncio.sleep(0.1)
            assert not len(service.sessions)
            await server.drain(60.0)
            await reading
            assert text == own
            assert service.verifier.cache.num_bytes == 0
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await waiting.close()

    asyncio.run(run())


def test_texts_of_the_server_alone_end_at_its_limit() -> None:
    most = len(PROMPT) + 3
    service = TargetService(tiny.target(), None, ServiceOptions(max_tokens=most))

    async def run() -> None:
        async with TargetServer(service, ServerOptions(port=0)) as server:
            alone = RemoteText(WebSocketTransport(server.url), frozenset())
            events = [event async for event in alone.stream(PROMPT, max_new_tokens=NEW)]
            assert sum(len(event.token_ids) for event in events) == 3

    asyncio.run(run())


def test_credentials_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="comes with its key"):
        Credentials(certificate=tmp_path)
    with pytest.raises(InputError, match="name the server's ca"):
        Credentials(certificate=tmp_path, key=tmp_path)
    assert WebSocketTransport("ws://[::1]:50051", Credentials(token="secret")).address
    (tmp_path / "garbage.pem").write_text("no certificate")
    for ca in ("garbage.pem", "none"):
        with pytest.raises(InputError, match=rf"Cannot use \S+{ca} for TLS"):
            WebSocketTransport("wss://server:50051", Credentials(ca=tmp_path / ca))
    with pytest.raises(InputError, match="has no TLS"):
        WebSocketTransport("ws://localhost:1", Credentials(ca="system"))
    for token in ("a\r\nHost: x", "Ausweis für Ada"):
        with pytest.raises(InputError, match="printable ASCII"):
            WebSocketTransport("ws://localhost:1", Credentials(token=token))
    with pytest.raises(InputError, match="no certificate chain and its private key"):
        server_tls(tmp_path / "garbage.pem", tmp_path / "garbage.pem")
    (tmp_path / "tokens").write_text("[]")
    with pytest.raises(InputError, match="must hold"):
        CallAuth.read(tmp_path / "tokens")
