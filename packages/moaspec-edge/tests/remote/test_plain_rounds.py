"""Rounds without drafts, of devices whose server streams tokens that no request asks for."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

import moaspec
import tiny
from links import Faults, FaultyTransport, Restartable
from moaspec_core.drafting.draft_tree import Tree
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.errors import WireError
from moaspec_core.support.limits import MAX_STREAMED
from moaspec_edge.device.events import RemoteEvent
from moaspec_edge.device.link_policy import FIRST_LOSS, LOSS_PER_TOKEN, LinkPolicy
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol import wire
from moaspec_edge.protocol.transport import Connection, InProcessTransport
from moaspec_edge.server.server_session import ServerSession
from moaspec_edge.server.service import ServiceOptions, TargetService
from simulated_time import run_simulated

NEW = tiny.NEW_TOKENS
PROMPT = list(tiny.PROMPTS[1])
LINKS = {
    "clean": Faults(),
    "messy": Faults(loss=0.08, twice=0.15, delay_s=0.004),
    "cut": Faults(loss=0.04, twice=0.1, delay_s=0.003, cut_after=(9, 13, 21)),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": 11, "logprobs": True},
}


def service(**options: Any) -> TargetService:
    return TargetService(tiny.target(), tiny.agreeing_drafter("llama"), ServiceOptions(**options))


def plain(prompt: Any, number: int = NEW, **options: Any) -> list[int]:
    options["max_new_tokens"] = number
    return moaspec.generate(tiny.target(), prompt, **options).token_ids


def mixed(monkeypatch: pytest.MonkeyPatch, longest: int = 5) -> None:
    """Two drafts after each `longest` rounds without any, whatever pays."""
    left = longest

    def shape(of: LinkPolicy, _length: int, _num_rows: int, _copied: float) -> Tree | None:
        nonlocal left
        if not left:
            left = longest
            return Chain(2)
        of.pause = left = left - 1
        return None

    monkeypatch.setattr(LinkPolicy, "shape", shape)


def session_of(transport: Any, **options: Any) -> RemoteSession:
    device = LocalDevice(tiny.target(), tiny.agreeing_drafter("llama"))
    return RemoteSession(device, transport, RemoteOptions(**options))


async def read(session: RemoteSession, prompt: Any, **options: Any) -> list[int]:
    text: list[int] = []
    async for event in session.stream(prompt, **options):
        text[event.start :] = event.token_ids
    return text


@pytest.mark.slow
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("ahead", [True, False])
def test_texts_are_the_same(
    link: str, setting: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafted and plain rounds in turn; every second turn is stopped in the middle."""

    async def run() -> None:
        server = Restartable(service)
        transport = FaultyTransport(server.transport, LINKS[link])
        session = session_of(transport, draft_ahead=ahead)
        for number, prompt in enumerate(tiny.PROMPTS):
            options = SETTINGS[setting] | {"max_new_tokens": NEW}
            if number % 2:
                async for event in session.stream(prompt, **options):
                    if event.start > 3:
                        break
            assert await read(session, prompt, **options) == plain(prompt, **options)
            if link == "clean":
                assert session.result.num_drafted
                assert session._verifier._streamed
        await session.close()
        await server.service.stop()

    mixed(monkeypatch)
    run_simulated(run(), pass_s=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_stream_that_is_closed_late_leaves_the_next_turn_alone(when: str) -> None:
    """Python closes a stream that a loop has left some time later."""

    async def run() -> None:
        server = Restartable(service)
        session = session_of(server.transport())
        first = session.stream(PROMPT, max_new_tokens=NEW)
        await anext(first)
        closing = asyncio.create_task(first.aclose()) if when != "after" else None
        if when == "during":
            await asyncio.sleep(0)
        second = session.stream(PROMPT, max_new_tokens=NEW)
        text = list((await anext(second)).token_ids)
        await (closing or first.aclose())
        async for event in second:
            text[event.start :] = event.token_ids
        assert text == plain(PROMPT)
        await session.close()
        await server.service.stop()

    run_simulated(run(), pass_s=0.01)


@pytest.mark.slow
def test_the_reader_of_an_ended_turn_gets_nothing_of_the_next_one() -> None:
    async def run() -> None:
        server = Restartable(service)
        session = session_of(server.transport())
        first = session.stream(PROMPT, max_new_tokens=NEW)
        read = list((await anext(first)).token_ids)
        second = session.stream(PROMPT, max_new_tokens=NEW)
        text = list((await anext(second)).token_ids)

        async def read_on() -> None:
            async for event in first:
                read[event.start :] = event.token_ids

        reader = asyncio.create_task(read_on())
        async for event in second:
            text[event.start :] = event.token_ids
        await reader
        assert text == plain(PROMPT)
        assert read == text[: len(read)]
        assert len(read) < len(text)
        await session.close()
        await server.service.stop()

    run_simulated(run(), pass_s=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("on_cut", ["rollback", "keep"])
def test_a_cut_in_the_middle_of_a_stream(
    on_cut: Any, setting: str, restart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link falls into a hole while the server streams, and provisional text is shown."""

    async def run() -> None:
        server = Restartable(service)
        transport = FaultyTransport(server.transport)
        session = session_of(transport, on_cut=on_cut)
        options = SETTINGS[setting] | {"max_new_tokens": NEW}
        text, events = list[int](), list[RemoteEvent]()
        async for event in session.stream(PROMPT, **options):
            events.append(event)
            text[event.start :] = event.token_ids
            if len(text) == 7:
                assert session._verifier._streamed > len(PROMPT) + len(text)
                transport.hole = True
            if sum(bool(one.num_provisional) for one in events) == 4 and transport.hole:
                if restart:
                    await server.restart()
                transport.hole = False
        assert session.result.token_ids == text
        assert session.stats.cuts
        if on_cut == "rollback":
            assert text == plain(PROMPT, **options)
        else:
            after = max(one.start for one in events if one.num_provisional) + 1
            rest = plain([*PROMPT, *text[:after]], NEW - after, **SETTINGS[setting])
            assert text[after:] == rest or SETTINGS[setting]  # noise depends on the prompt's length
            assert session.stats.corrected == 0
        await session.close()
        await server.service.stop()

    mixed(monkeypatch, 64)
    run_simulated(run(), pass_s=0.01)


def test_an_older_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows neither field: it streams nothing, and is not asked to."""

    async def run() -> None:
        server = Restartable(service)
        session = session_of(FaultyTransport(server.transport))
        assert await read(session, PROMPT, max_new_tokens=NEW) == plain(PROMPT)
        assert session._verifier._streamed == 0
        assert {bool(one.drafted) for one in list(session.stats.rounds)[1:]} == {False, True}
        await session.close()
        await server.service.stop()

    monkeypatch.setattr(ServerSession, "max_streamed", 0)
    mixed(monkeypatch)
    run_simulated(run(), pass_s=0.01)


def test_tokens_are_streamed_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        server = Restartable(service)
        session = session_of(FaultyTransport(server.transport))
        got = await read(session, PROMPT, max_new_tokens=NEW)
        assert got == plain(PROMPT)
        assert set(session.result.sources) == {"target"}
        (held,) = server.service.sessions
        assert held.token_ids == [*PROMPT, *got]  # nothing beyond the turn's end
        await session.close()
        await server.service.stop()

    mixed(monkeypatch, 64)
    run_simulated(run(), pass_s=0.01)


def test_a_device_that_never_drafts_has_tokens_streamed() -> None:
    """It neither measures draft steps nor counts rounds as missed by drafts."""

    async def run() -> None:
        server = Restartable(service)
        session = session_of(FaultyTransport(server.transport))
        assert await read(session, PROMPT, max_new_tokens=NEW, tree=None) == plain(PROMPT)
        assert session._verifier._streamed == len(PROMPT) + NEW
        assert session._ahead.step_s is None
        assert (session.stats.ahead_hits, session.stats.ahead_misses) == (0, 0)
        await session.close()
        await server.service.stop()

    run_simulated(run(), pass_s=0.01)


def test_a_device_that_never_drafts_sends_no_drafts_after_a_cut() -> None:
    async def run() -> None:
        server = Restartable(service)
        transport = FaultyTransport(server.transport)
        session = session_of(transport)
        options: Any = {"max_new_tokens": NEW, "tree": None}
        async for event in session.stream(PROMPT, **options):
            transport.hole = not session.stats.cuts and event.start > 5
        assert session.stats.cuts
        assert session.stats.provisional
        assert session.result.token_ids == plain(PROMPT)
        assert session.result.num_drafted == 0
        await session.close()
        await server.service.stop()

    run_simulated(run(), pass_s=0.01)


@pytest.mark.parametrize("on_cut", ["rollback", "keep"])
def test_tokens_of_a_cut_are_no_gain(on_cut: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has verified those that are kept, and a cut lasts longer than a round."""

    async def run() -> None:
        server = Restartable(service)
        transport = FaultyTransport(server.transport)
        session = session_of(transport, on_cut=on_cut, max_provisional=8)
        most = FIRST_LOSS + LOSS_PER_TOKEN * NEW
        async for event in session.stream(PROMPT, max_new_tokens=NEW):
            transport.hole = not session.stats.cuts and event.start > 5
        assert session.stats.provisional > 4
        assert any(one.repeated for one in list(session.stats.rounds)[1:])
        assert not any(session.stats._waits)
        assert session._auto._budget <= most
        await session.close()
        await server.service.stop()

    mixed(monkeypatch, 64)
    run_simulated(run(), pass_s=0.05)


@pytest.mark.parametrize("tree", ["auto", "chain:2"])
def test_only_streamed_tokens_are_observed(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations of a new prompt have not come, and fixed drafts tell `LinkPolicy` nothing."""

    async def run() -> None:
        server = Restartable(service)
        session = session_of(server.transport())
        observed = list[bool]()

        def observe(_of: LinkPolicy, _is_right: bool) -> None:
            assert session._verifier._pending is not None
            observed.append(session._verifier._pending.opening)

        monkeypatch.setattr(LinkPolicy, "observe", observe)
        text = list(PROMPT)
        for turn in range(6):
            text += await read(session, text, max_new_tokens=8, tree=tree)
            text += [(7 * turn + 3 * place) % tiny.VOCAB for place in range(12)]
        assert set(observed) == ({False} if tree == "auto" else set())
        await session.close()
        await server.service.stop()

    run_simulated(run(), pass_s=0.05)


class OneLost:
    """A connection that loses one verdict."""

    def __init__(self, inner: Connection, number: int) -> None:
        self._inner, self._left = inner, number
        self.send, self.close = inner.send, inner.close

    async def receive(self) -> bytes:
        frame = await self._inner.receive()
        self._left -= wire.parse(frame, pb.ServerMessage()).HasField("verdict")
        if self._left:
            return frame
        self._left = -1
        return await self.receive()


@pytest.mark.parametrize("number", [2, 5, 9])
def test_a_streamed_token_that_is_lost_is_asked_for_at_once(number: int) -> None:
    async def run() -> float:
        at = service()
        inner = InProcessTransport(at)

        async def connect() -> Connection:
            return OneLost(await inner.connect(), number)

        session = session_of(SimpleNamespace(connect=connect))
        started_s = time.monotonic()
        assert await read(session, PROMPT, max_new_tokens=NEW, tree=None) == plain(PROMPT)
        took_s = time.monotonic() - started_s
        await session.close()
        await at.stop()
        return took_s

    assert run_simulated(run(), pass_s=0.01) < 0.01 * (NEW + 5)


def test_a_stop_token_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        server = Restartable(service)
        session = session_of(FaultyTransport(server.transport))
        text = plain(PROMPT)
        stop = next(
            token for place, token in enumerate(text) if place > 3 and token not in text[:3]
        )
        got = await read(session, PROMPT, max_new_tokens=NEW, stop_token_ids=[stop])
        assert got == text[: text.index(stop) + 1]
        (held,) = server.service.sessions
        while held.task is not None:
            await asyncio.sleep(0.005)
        assert len(held.token_ids) < len(PROMPT) + len(got) + 5
        await session.close()
        await server.service.stop()

    mixed(monkeypatch, 64)
    run_simulated(run(), pass_s=0.02)


def test_a_server_that_says_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts for later requests are kept within the stream only, one for each length."""

    async def run() -> None:
        server = Restartable(service)
        session = session_of(FaultyTransport(server.transport))
        verifier, text, refused = session._verifier, list[int](), 0
        async for event in session.stream(PROMPT, max_new_tokens=NEW):
            text[event.start :] = event.token_ids
            late, verifier._early = verifier._early, {}
            for base in 2 * list(range(len(verifier.text) + 300)):
                try:
                    verifier._verdict(pb.Verdict(base=base))
                except WireError:
                    refused += 1
            assert len(verifier._early) <= 1 + MAX_STREAMED
            verifier._early = late
        assert refused
        assert text == plain(PROMPT)
        await session.close()
        await server.service.stop()

    mixed(monkeypatch, 64)
    run_simulated(run(), pass_s=0.01)
