"""Several servers as one: which serves a text, and what happens when it goes."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import moaspec
import tiny
from certificates import Authority
from links import FaultyTransport
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.errors import InputError, LinkError
from moaspec_edge.device.link import BACKOFF_S
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.device.server_text import RemoteText
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol.fleet import KEY_TOKENS, Fleet, key_of
from moaspec_edge.protocol.transport import InProcessTransport
from moaspec_edge.server.auth import CallAuth, Credentials, server_tls
from moaspec_edge.server.listeners.websocket_server import ServerOptions, TargetServer
from moaspec_edge.server.service import ServiceOptions, TargetService
from moaspec_edge.server.session_store import StoreOptions
from moaspec_edge.server.shared_verifier import PassOptions
from simulated_time import run_simulated

PROMPT = tiny.PROMPTS[1]
NEW = tiny.NEW_TOKENS
ADDRESSES = ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")
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
        self.fleet = Fleet(ADDRESSES, lambda server, _: self.transports[server])
        self.drafter = drafter or moaspec.NgramProposer()

    def session(self, **options: Any) -> RemoteSession:
        remote = RemoteOptions(draft=Chain(2), **options)
        return RemoteSession(LocalDevice(tiny.target(), self.drafter), self.fleet, remote)

    def holding(self) -> list[str]:
        """The servers that have a session."""
        return [one for one, service in self.services.items() if len(service.sessions)]

    async def stop(self) -> None:
        for service in self.services.values():
            await service.stop()


def test_the_beginning_of_a_text_decides_the_order_of_its_servers() -> None:
    fleet = Servers().fleet
    texts = [[number] * KEY_TOKENS for number in range(300)]
    orders = [fleet.ranked(key_of(text)) for text in texts]
    assert orders == [fleet.ranked(key_of([*text, 1, 2])) for text in texts]
    assert min(Counter(order[0] for order in orders).values()) > 60, "the hash is not even"
    assert all(set(order) == set(ADDRESSES) for order in orders)
    later = fleet.ranked(key_of(texts[0]), own=orders[0][2])
    assert later == [orders[0][2], *orders[0][:2]]
    fleet.avoid(orders[0][0], 60.0)
    assert fleet.ranked(key_of(texts[0])) == [*orders[0][1:], orders[0][0]]


def test_a_fleet_has_a_server() -> None:
    with pytest.raises(InputError, match="at least one"):
        Fleet.at([])
    assert len(Fleet.at(["ws://one:1", "one:1"]).addresses) == 1


def test_a_fleet_forgets_servers_that_it_no_longer_avoids() -> None:
    fleet = Fleet(ADDRESSES, lambda *_: Alone([], breaks=False))
    past, avoided, _ = ADDRESSES
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
        assert gone[0] == Servers().fleet.ranked(key_of(PROMPT))[0]
        await session.close()
        await servers.stop()

    run_simulated(run())


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

    run_simulated(run())


@pytest.mark.slow
def test_a_cut_of_the_device_leaves_the_session_where_it_is() -> None:
    """An attempt that takes too long is made once more, before another server reads the text."""

    async def run() -> None:
        servers = Servers()
        session = servers.session(on_cut="wait")
        text: list[int] = []
        async for event in session.stream(PROMPT, max_new_tokens=NEW):
            text[event.start :] = event.token_ids
            if len(text) >= 4 and not session.stats.cuts:
                for one in servers.transports.values():
                    one.hole = True
                while session.stats.state == "up":
                    await asyncio.sleep(0.01)
                await asyncio.sleep(2 * BACKOFF_S)  # the first attempt is under way
                for one in servers.transports.values():
                    one.hole = False
        assert text == list(tiny.own_texts("llama")[1])
        assert session.stats.reopened == 0
        assert len(servers.holding()) == 1
        await session.close()
        await servers.stop()

    run_simulated(run())


def test_users_without_a_link_are_told_what_to_check() -> None:
    told = Fleet.at(["a:1", "wss://b:1"]).no_link
    assert told.startswith("No link to ws://a:1, wss://b:1;")
    assert "Does `moaspec target-server` run there?" in told


def test_an_unreachable_server_is_passed_by() -> None:
    async def run() -> None:
        servers = Servers()
        best, second, _ = servers.fleet.ranked(key_of(PROMPT))
        servers.transports[best].hole = True
        for _ in range(2):  # the second session does not even try
            session = servers.session()
            result = await session.generate(PROMPT, max_new_tokens=NEW)
            assert result.token_ids == list(tiny.own_texts("llama")[1])
            assert servers.holding() == [second]
            await session.close()
            while servers.holding():
                await asyncio.sleep(0.01)
        for one in servers.transports.values():
            one.hole = True
        session = servers.session(give_up_s=1.0)
        with pytest.raises(LinkError, match="No link"):
            await session.generate(PROMPT, max_new_tokens=NEW)
        await session.close()
        await servers.stop()

    run_simulated(run())


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
        order = Fleet(ADDRESSES, lambda *_: Alone([], breaks=False)).ranked(key_of([7]))
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
@pytest.mark.usefixtures("patient_link")
def test_servers_with_tls_and_one_that_ends(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    files: Any = authority.certificate("localhost")
    entry = {"phone": {"sha256": hashlib.sha256(b"secret").hexdigest(), "max_sessions": 7}}
    (tmp_path / "tokens.json").write_text(json.dumps(entry))
    guard = CallAuth.read(tmp_path / "tokens.json")
    assert StoreOptions(shares=guard.max_sessions).share_of("phone") == 7

    def made() -> TargetServer:
        options = ServerOptions(host="localhost", port=0, tls=server_tls(*files), guard=guard)
        return TargetServer(TargetService(tiny.target()), options)

    async def run() -> None:
        servers = [made(), made()]
        for one in servers:
            await one.__aenter__()
        addresses = [one.url.removeprefix("wss://") for one in servers]
        fleet = Fleet.at(addresses, Credentials(token="secret", ca=authority.ca))
        device = LocalDevice(tiny.target(), moaspec.NgramProposer())
        session = RemoteSession(device, fleet, RemoteOptions(draft=Chain(2)))
        text: list[int] = []
        async for event in session.stream(PROMPT, max_new_tokens=NEW):
            text[event.start :] = event.token_ids
            if len(text) >= 4 and len(servers) == 2:
                (busy,) = [one for one in servers if len(one.service.sessions)]
                servers.remove(busy)
                await busy.__aexit__()
        assert text == list(tiny.own_texts("llama")[1])
        ids = RemoteText(fleet, tiny.target().stop_token_ids)
        alone = [e async for e in ids.stream(PROMPT, max_new_tokens=NEW)]
        assert [token for e in alone for token in e.token_ids] == text
        await session.close()
        for one in servers:
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
