"""Several servers as one: which serves a text, and what happens when it goes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import socket
import threading
from collections import Counter
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import moaspec
import tiny
from certificates import Authority
from free_port import free_port
from links import FaultyTransport
from moaspec.drafting.tree_shapes import Chain
from moaspec.errors import InputError, LinkError
from moaspec.remote.device.link import LinkOptions
from moaspec.remote.device.local_parts import LocalDevice
from moaspec.remote.device.remote_session import RemoteOptions, RemoteSession
from moaspec.remote.device.server_text import RemoteText
from moaspec.remote.protocol import target_pb2 as pb
from moaspec.remote.protocol.fleet import KEY_TOKENS, Fleet, Server, key_of
from moaspec.remote.protocol.transport import InProcessTransport
from moaspec.remote.server.auth import CallAuth, Credentials, server_tls
from moaspec.remote.server.listeners.websocket_server import ServerOptions, TargetServer
from moaspec.remote.server.service import ServiceOptions, TargetService
from moaspec.remote.server.session_store import StoreOptions
from moaspec.remote.server.shared_verifier import PassOptions

PROMPT = tiny.PROMPTS[1]
NEW = tiny.NEW_TOKENS
ADDRESSES = ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")
PATIENT = LinkOptions(dead_after_s=30.0, connect_s=30.0)
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 5}


class Servers:
    """Three services of one target in this event loop, and the fleet of them."""

    def __init__(self, drafter: Any = None, **options: Any) -> None:
        self.services = {
            one: TargetService(tiny.target(), drafter, ServiceOptions(**options))
            for one in ADDRESSES
        }
        self.transports = {
            one: FaultyTransport(partial(InProcessTransport, service))
            for one, service in self.services.items()
        }
        self.fleet = Fleet(ADDRESSES, lambda server, _: self.transports[server.address])
        self.drafter = drafter or moaspec.NgramProposer()

    def session(self, link: LinkOptions = PATIENT, **options: Any) -> RemoteSession:
        remote = RemoteOptions(link=link, draft=Chain(2), **options)
        return RemoteSession(LocalDevice(tiny.target(), self.drafter), self.fleet, remote)

    def holding(self) -> list[str]:
        """The servers that have a session."""
        return [one for one, service in self.services.items() if len(service.sessions)]

    async def stop(self) -> None:
        for service in self.services.values():
            await service.stop()


async def first(fleet: Fleet, token_ids: list[int]) -> Server:
    return (await fleet.ranked(key_of(token_ids)))[0]


def test_the_beginning_of_a_text_chooses_its_server() -> None:
    async def run() -> None:
        servers = Servers()
        texts = [[number] * KEY_TOKENS for number in range(300)]
        chosen = [await first(servers.fleet, text) for text in texts]
        assert chosen == [await first(servers.fleet, [*text, 1, 2]) for text in texts]
        assert min(Counter(chosen).values()) > 60, "the hash is not even"
        fewer = Fleet(ADDRESSES[:2], lambda server, _: servers.transports[server.address])
        for text, server in zip(texts, chosen, strict=True):
            if server.address in fewer.addresses:
                assert await first(fewer, text) == server, "a text moved without need"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("found", "ips"),
    [
        (["10.0.0.2", "10.0.0.1", "10.0.0.2"], ["10.0.0.1", "10.0.0.2"]),
        (["10.0.0.1", "fd00::1"], [""]),  # one server of both families
        # The system sorts addresses: those that the network does not reach are last.
        (["fd00::2", "fd00::1", "10.0.0.1", "10.0.0.2"], ["fd00::1", "fd00::2"]),
        (["10.0.0.1", "10.0.0.2", "fd00::1", "fd00::2"], ["10.0.0.1", "10.0.0.2"]),
        (["10.0.0.1", "fd00::1", "fd00::2"], [""]),
        ([], [""]),  # unknown: the transport says so
    ],
)
@pytest.mark.parametrize("address", ["name:50051", "wss://name:8443/path", "ws://name"])
def test_a_name_with_several_addresses_is_a_fleet(
    address: str, found: list[str], ips: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve(monkeypatch, found)
    fleet = Fleet([address], lambda *_: InProcessTransport(TargetService(tiny.target())))
    ranked = asyncio.run(fleet.ranked(b""))
    assert sorted(ranked, key=lambda one: one.ip) == [Server(address, ip) for ip in ips]


def resolve(monkeypatch: pytest.MonkeyPatch, found: list[str]) -> None:
    """Let every name have these addresses."""
    real = socket.getaddrinfo

    def look_up(host: str, port: int, *arguments: Any, **options: Any) -> list[Any]:
        if host != "name":
            return real(host, port, *arguments, **options)
        if not found:
            raise socket.gaierror
        return [
            (socket.AF_INET6 if ":" in ip else socket.AF_INET, 0, 0, "", (ip, port)) for ip in found
        ]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def test_a_name_server_that_does_not_answer_blocks_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Meanwhile, the last result is used, and the servers of other addresses."""
    resolve(monkeypatch, ["10.0.0.1", "10.0.0.2"])
    answers, asked = socket.getaddrinfo, list[str]()
    answering = threading.Event()

    def look_up(host: str, *arguments: Any, **options: Any) -> Any:
        asked.append(host)
        answering.wait(60)
        return answers(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr("moaspec.remote.protocol.fleet.LATE_S", 0.01)
    several = [Server("name:1", "10.0.0.1"), Server("name:1", "10.0.0.2")]

    async def run() -> None:
        only = Fleet(["name:1"], lambda *_: Alone([], breaks=False))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(only.ranked(b""), 0.01)
        answering.set()
        assert sorted(await only.ranked(b""), key=str) == several
        answering.clear()
        asked.clear()
        for _ in range(3):
            assert sorted(await only.ranked(b""), key=str) == several
        both = Fleet(["name:1", "127.0.0.1:1"], lambda *_: Alone([], breaks=False))
        for _ in range(3):
            assert await both.ranked(b"") == [Server("127.0.0.1:1")]
        while len(asked) < 2:  # a thread may begin late
            await asyncio.sleep(0.01)
        assert asked == ["name"] * 2, "each fleet has one lookup"

    asyncio.run(run())
    answering.set()


def test_a_lookup_that_ends_as_it_is_given_up_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11's `wait_for` loses a cancellation that comes as the awaited work ends."""
    resolve(monkeypatch, ["10.0.0.1"])

    async def run() -> None:
        fleet = Fleet(["name:1"], lambda *_: Alone([], breaks=False))
        waiting = asyncio.create_task(fleet._lookups.servers("name:1", 60.0))
        await asyncio.sleep(0)
        for thread in threading.enumerate():
            if thread.name == "lookup":
                thread.join()  # the event loop hears of the result next
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(run())


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "[::1]:1", "ws://10.0.0.1:1/path", "wss://[fd00::1]", "localhost:1"]
)
def test_what_is_no_name_is_not_looked_up(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: Any, **__: Any) -> None:
        raise AssertionError(address)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    fleet = Fleet([address], lambda *_: Alone([], breaks=False))
    assert asyncio.run(fleet.ranked(b"")) == [Server(address)]
    assert not fleet._lookups._running


def test_a_fleet_forgets_servers_that_it_no_longer_avoids() -> None:
    fleet = Fleet(ADDRESSES, lambda *_: Alone([], breaks=False))
    past, avoided, _ = map(Server, ADDRESSES)
    fleet.avoid(past, 0.0)
    fleet.avoid(avoided, 60.0)
    assert list(fleet._avoided) == [avoided]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stop", "drain"])
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_text_goes_on_with_the_next_server(how: str, options: dict[str, Any]) -> None:
    """The session is opened again from its token ids, with its drafter's activations."""

    async def run() -> None:
        # A device leaves a server that drains within 50 ms; the text must not end before that.
        slow = PassOptions(min_pass_s=0.02)
        servers = Servers(tiny.random_drafter(tiny.target()), passes=slow)
        session = servers.session()
        gone: list[str] = []
        text: list[int] = []
        async for event in session.stream(PROMPT, max_new_tokens=NEW, **options):
            text[event.start :] = event.token_ids
            left = [one for one in connected(servers) if one not in gone]
            if left and len(text) >= 4 * (len(gone) + 1) and len(gone) < 2:
                gone += left
                service = servers.services[left[0]]
                await (service.stop() if how == "stop" else service.drain(60.0))
        expected = moaspec.generate(tiny.target(), PROMPT, max_new_tokens=NEW, **options)
        assert text == session.result.token_ids == expected.token_ids
        assert len(gone) == 2
        assert session.stats.reopened == 2
        assert gone[0] == (await Servers().fleet.ranked(key_of(PROMPT)))[0].address
        await session.close()
        await servers.stop()

    asyncio.run(run())


def connected(servers: Servers) -> list[str]:
    """The servers with a session whose device is connected."""
    return [
        one
        for one, service in servers.services.items()
        if any(session.stream is not None for session in service.sessions)
    ]


@pytest.mark.slow
def test_a_server_without_room_sends_texts_to_the_next() -> None:
    async def run() -> None:
        servers = Servers(sessions=StoreOptions(max_sessions=1))
        sessions = [servers.session() for _ in range(4)]
        for session in sessions[:3]:
            await session.generate(PROMPT, max_new_tokens=2)
        assert servers.holding() == list(ADDRESSES)
        waiting = asyncio.create_task(sessions[3].generate(PROMPT, max_new_tokens=NEW))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await sessions[1].close()
        result = await waiting
        assert result.token_ids == list(tiny.own_texts("llama")[1])
        for session in sessions:
            await session.close()
        await servers.stop()

    asyncio.run(run())


@pytest.mark.slow
def test_a_cut_of_the_device_leaves_the_session_where_it_is() -> None:
    """An attempt that takes too long is made once more, before another server reads the text."""
    link = LinkOptions(dead_after_s=0.5, connect_s=0.5, backoff_s=0.01, max_backoff_s=0.02)

    async def run() -> None:
        servers = Servers()
        session = servers.session(link, on_cut="wait")
        text: list[int] = []
        async for event in session.stream(PROMPT, max_new_tokens=NEW):
            text[event.start :] = event.token_ids
            if len(text) >= 4 and not session.stats.cuts:
                for one in servers.transports.values():
                    one.hole = True
                while session.stats.state == "up":
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.1)  # the first attempt is under way
                for one in servers.transports.values():
                    one.hole = False
        assert text == list(tiny.own_texts("llama")[1])
        assert session.stats.reopened == 0
        assert len(servers.holding()) == 1
        await session.close()
        await servers.stop()

    asyncio.run(run())


def test_users_without_a_link_are_told_what_to_check() -> None:
    told = Fleet.at(["a:1", "wss://b:1"]).no_link
    assert told.startswith("No link to ws://a:1, wss://b:1;")
    assert "Does `moaspec target-server` run there?" in told


def test_an_unreachable_server_is_passed_by() -> None:
    link = LinkOptions(connect_s=0.2, backoff_s=0.01, max_backoff_s=0.02, dead_after_s=30.0)

    async def run() -> None:
        servers = Servers()
        best, second, _ = await servers.fleet.ranked(key_of(PROMPT))
        servers.transports[best.address].hole = True
        for _ in range(2):  # the second session does not even try
            session = servers.session(link)
            result = await session.generate(PROMPT, max_new_tokens=NEW)
            assert result.token_ids == list(tiny.own_texts("llama")[1])
            assert servers.holding() == [second.address]
            await session.close()
            while servers.holding():
                await asyncio.sleep(0.01)
        for one in servers.transports.values():
            one.hole = True
        session = servers.session(link, give_up_s=1.0)
        with pytest.raises(LinkError, match="No link"):
            await session.generate(PROMPT, max_new_tokens=NEW)
        await session.close()
        await servers.stop()

    asyncio.run(run())


class Alone:
    """A server that decodes alone, and breaks after some messages."""

    def __init__(self, messages: list[list[int]], *, breaks: bool) -> None:
        self._messages, self._breaks = messages, breaks

    async def connect(self) -> Any:
        raise LinkError("No sessions here.")

    async def describe(self) -> pb.Description:
        if self._breaks:
            raise LinkError("broken")
        return pb.Description(name="whole")

    async def generate(
        self,
        request: pb.GenerateRequest,  # noqa: ARG002
    ) -> AsyncGenerator[pb.Generated]:
        for ids in self._messages:
            yield pb.Generated(token_ids=ids, sources=[0] * len(ids))
        if self._breaks:
            raise LinkError("broken")
        yield pb.Generated(stop_reason="max_new_tokens")


@pytest.mark.parametrize("third", [4, 5])
def test_the_next_server_writes_on_what_the_last_wrote_alone(third: int) -> None:
    request = pb.GenerateRequest(token_ids=[7])

    async def run() -> list[int]:
        order = await Fleet(ADDRESSES, lambda *_: Alone([], breaks=False)).ranked(key_of([7]))
        whole = Alone([[1], [2, 3, third], [6]], breaks=False)
        broken = Alone([[1, 2], [3, 4]], breaks=True)
        by_server = {order[0]: broken, order[1]: Alone([[1]], breaks=True), order[2]: whole}
        fleet = Fleet(ADDRESSES, lambda server, _: by_server.get(server, whole))
        messages = [one async for one in fleet.generate(request)]
        assert messages[-1].stop_reason == "max_new_tokens"
        assert (await fleet.describe()).name == "whole"
        return [token for one in messages for token in one.token_ids]

    if third == 4:
        assert asyncio.run(run()) == [1, 2, 3, 4, 6]
    else:
        with pytest.raises(LinkError, match="another text"):
            asyncio.run(run())


@pytest.mark.slow
def test_one_name_with_tls_and_a_server_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real servers at two addresses of one name, which their certificates bear."""
    authority = Authority(tmp_path, "ours")
    files: Any = authority.certificate("name")
    entry = {"phone": {"sha256": hashlib.sha256(b"secret").hexdigest(), "max_sessions": 7}}
    (tmp_path / "tokens.json").write_text(json.dumps(entry))
    guard = CallAuth.read(tmp_path / "tokens.json")
    assert StoreOptions(shares=guard.max_sessions).share_of("phone") == 7
    resolve(monkeypatch, ["127.0.0.1", "127.0.0.2"])

    def made(ip: str, port: int) -> TargetServer:
        options = ServerOptions(host=ip, port=port, tls=server_tls(*files), guard=guard)
        return TargetServer(TargetService(tiny.target()), options)

    async def run() -> None:
        ips = "127.0.0.1", "127.0.0.2"
        port = free_port(ips)
        servers = {ip: made(ip, port) for ip in ips}
        for one in servers.values():
            await one.__aenter__()
        credentials = Credentials(token="secret", ca=authority.ca)
        fleet = Fleet.at([f"name:{port}"], credentials)
        assert {one.ip for one in await fleet.ranked(b"")} == set(servers)
        device = LocalDevice(tiny.target(), moaspec.NgramProposer())
        session = RemoteSession(device, fleet, RemoteOptions(link=PATIENT, draft=Chain(2)))
        text: list[int] = []
        async for event in session.stream(PROMPT, max_new_tokens=NEW):
            text[event.start :] = event.token_ids
            if len(text) >= 4 and len(servers) == 2:
                (busy,) = [ip for ip, one in servers.items() if len(one.service.sessions)]
                await servers.pop(busy).__aexit__()
        assert text == list(tiny.own_texts("llama")[1])
        ids = RemoteText(fleet, tiny.target().stop_token_ids)
        alone = [e async for e in ids.stream(PROMPT, max_new_tokens=NEW)]
        assert [token for e in alone for token in e.token_ids] == text
        await session.close()
        for one in servers.values():
            await one.__aexit__()

    asyncio.run(run())


def test_bad_addresses_and_credentials_are_noticed_at_once() -> None:
    with pytest.raises(InputError, match="clear"):
        Fleet.at(["127.0.0.1:1", "elsewhere:1"], Credentials(token="secret"))
    with pytest.raises(InputError, match="wss://"):
        Fleet.at(["127.0.0.1:1", "wss://"], None)


def test_a_server_warms_up_and_leaves_nothing() -> None:
    service = TargetService(tiny.target(), tiny.random_drafter(tiny.target()))

    async def run() -> None:
        await service.warm_up()
        assert service.shared.counts.passes > 1
        assert service.shared.num_rows == service.verifier.cache.num_bytes == 0
        await service.stop()

    asyncio.run(run())


def test_a_text_has_room_for_a_token_after_its_prompt() -> None:
    with pytest.raises(InputError, match="at least 2, got 1"):
        ServiceOptions(max_tokens=1)

    async def run() -> None:
        service = TargetService(tiny.target(), options=ServiceOptions(max_tokens=2))
        await service.warm_up()
        await service.stop()

    asyncio.run(run())
