"""Rounds without drafts: the server streams tokens that no request asks for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

import moaspec
import tiny
from links import QUICK, Faults, FaultyTransport, Restartable
from moaspec.drafting.draft_tree import DraftTree
from moaspec.errors import WireError
from moaspec.remote.device import link_policy
from moaspec.remote.device.events import RemoteEvent
from moaspec.remote.device.link import LinkOptions
from moaspec.remote.device.link_policy import (
    MAX_LOSS,
    MAX_MEASURING,
    MAX_PAUSE,
    MIN_PAUSE,
    LinkPolicy,
)
from moaspec.remote.device.local_parts import LocalDevice
from moaspec.remote.device.remote_session import RemoteOptions, RemoteSession
from moaspec.remote.protocol import identity, wire
from moaspec.remote.protocol import target_pb2 as pb
from moaspec.remote.protocol.transport import Connection, pipe
from moaspec.remote.server.server_session import DraftRequest, ServerSession
from moaspec.remote.server.service import ServiceOptions, TargetService
from moaspec.remote.server.session_store import StoreOptions
from moaspec.remote.server.shared_verifier import PassOptions
from moaspec.sampling.params import GREEDY, SamplingParams
from moaspec.support.limits import MAX_FURTHER
from moaspec.target.token_rules import TokenRules

NEW = tiny.NEW_TOKENS
PROMPT = list(tiny.PROMPTS[1])
PATIENT = LinkOptions(dead_after_s=60.0, connect_s=60.0, retry_s=60.0)
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


# The server


class Client:
    """A device that says what a test wants."""

    def __init__(self, connection: Connection, name: bytes) -> None:
        self._connection, self._name = connection, name

    async def send(self, **kind: Any) -> None:
        message = pb.ClientMessage(session=self._name, turn=1, **kind)
        await self._connection.send(message.SerializeToString())

    async def receive(self) -> pb.ServerMessage:
        return wire.parse_server(await asyncio.wait_for(self._connection.receive(), 60))

    async def open(self, sampling: SamplingParams = GREEDY) -> list[int]:
        """Open the turn; returns the text with its first token."""
        opening = pb.Open(
            protocol=identity.PROTOCOL,
            law=identity.SAMPLING_VERSION,
            target=identity.to_message(tiny.target().identity),
            sampling=wire.sampling_message(sampling),
            token_ids=PROMPT,
            prompt_length=len(PROMPT),
        )
        await self.send(open=opening)
        self.verdict = (await self.receive()).verdict
        return [*PROMPT, *self.verdict.tokens]

    async def ask(self, text: list[int], further: int, tokens: tuple[int, ...] = ()) -> list[int]:
        """Send a `Draft`; returns the tokens of all verdicts before the answer to a heartbeat."""
        await self.send(draft=pb.Draft(base=len(text), tokens=tokens, further=further))
        found, number = list[int](), 0
        while True:
            await self.send(heartbeat=pb.Heartbeat(number=(number := number + 1)))
            told = await self.receive()
            while not told.HasField("heartbeat"):
                assert told.verdict.base == len(text) + len(found)
                found += told.verdict.tokens
                number, told = 0, await self.receive()
            if number > 40 and found:  # far more than a pass takes on this target
                return found
            await asyncio.sleep(0.005)


@asynccontextmanager
async def connected(
    at: TargetService, owner: str = "alice", number: int = 0
) -> AsyncIterator[Client]:
    ours, theirs = pipe()
    serving = asyncio.create_task(at.converse(owner, theirs))
    try:
        yield Client(ours, bytes([*owner.encode()[:1], number] * 8))
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


@pytest.mark.parametrize(
    ("further", "number"), [(0, 1), (3, 4), (MAX_FURTHER + 1, 1 + MAX_FURTHER), (2**32 - 1, 33)]
)
def test_how_many_are_streamed(further: int, number: int) -> None:
    async def run() -> None:
        at = service()
        async with connected(at) as client:
            text = await client.open()
            assert client.verdict.max_further == MAX_FURTHER
            assert await client.ask(text, further) == plain(text, number)
        await at.stop()

    asyncio.run(run())


def test_drafts_are_verified_and_nothing_is_streamed() -> None:
    async def run() -> None:
        at = service()
        async with connected(at) as client:
            text = await client.open()
            right, other = plain(text, 2)
            assert await client.ask(text, 9, (right,)) == [right, other]
        await at.stop()

    asyncio.run(run())


def test_a_text_that_the_server_does_not_have_is_not_streamed() -> None:
    async def run() -> None:
        at = service()
        async with connected(at) as client:
            text = await client.open()
            await client.send(draft=pb.Draft(base=len(text) + 1000, further=MAX_FURTHER))
            assert (await client.receive()).problem.kind == pb.Problem.LOST
            assert await client.ask(text, 0) == plain(text, 1)
        await at.stop()

    asyncio.run(run())


def test_rules_forbid_streaming() -> None:
    """Behind the text's end, which only the device knows, they may allow no token."""

    async def run() -> None:
        at = service()
        async with connected(at) as client:
            text = await client.open(SamplingParams(rules=TokenRules(min_length=500)))
            assert client.verdict.max_further == 0
            assert len(await client.ask(text, MAX_FURTHER)) == 1
        await at.stop()

    asyncio.run(run())


def test_a_device_that_leaves_gets_no_more_passes() -> None:
    async def run() -> None:
        at = service(passes=PassOptions(min_pass_s=0.02))
        async with connected(at) as client:
            text = await client.open()
            await client.send(draft=pb.Draft(base=len(text), further=MAX_FURTHER))
            await client.receive()
        (session,) = at.sessions
        while session.task is not None:
            await asyncio.sleep(0.005)
        assert len(session.token_ids) < len(text) + MAX_FURTHER
        await at.stop()

    asyncio.run(run())


def test_a_request_replaces_the_number_at_once() -> None:
    """It is not answered by itself where the pass under way chooses its token."""

    async def run() -> None:
        at = service(passes=PassOptions(min_pass_s=0.05))
        async with connected(at) as client:
            text = await client.open()
            (session,) = at.sessions
            await client.send(draft=pb.Draft(base=len(text), further=MAX_FURTHER))
            while not at.shared._running:
                await asyncio.sleep(0)
            await client.send(draft=pb.Draft(base=len(text), further=2))
            while session.task is not None:
                await asyncio.sleep(0.005)
            assert session.token_ids[len(text) :] == plain(text, 3)
            told = [(await client.receive()).verdict.base for _ in range(3)]
            assert told == [len(text) + i for i in range(3)]
        await at.stop()

    asyncio.run(run())


def test_streamed_tokens_are_sent_again_only_where_a_request_is_repeated() -> None:
    """A device may ask for each token long after it was streamed."""

    async def run() -> None:
        at = service()
        async with connected(at) as client:
            text = await client.open()
            found = await client.ask(text, 5)
            for number in (1, 2, 3, 4, 5):
                await client.send(draft=pb.Draft(base=len(text) + number))
            await client.send(heartbeat=pb.Heartbeat(number=1))
            assert (await client.receive()).HasField("heartbeat")
            assert await client.ask([*text, *found[:2]], 0) == found[2:]
        await at.stop()

    asyncio.run(run())


def test_a_request_that_comes_with_an_older_one_is_answered() -> None:
    """The task has not begun, and would run the older one only."""

    async def run() -> None:
        at = service()
        async with connected(at) as client:
            text = await client.open()
            (session,) = at.sessions
            right, other = plain(text, 2)
            for base, tree in (
                (len(text) - 1, DraftTree()),
                (len(text), DraftTree((right,), (-1,))),
            ):
                at.work.put(session, DraftRequest(session.turn, base, tree))
            assert (await client.receive()).verdict.tokens == [right, other]
        await at.stop()

    asyncio.run(run())


def test_drafts_that_come_during_a_plain_pass_are_not_verified() -> None:
    """The device is told, so that it does not take them for wrong."""

    async def run() -> None:
        at = service()
        async with connected(at) as client:
            text = await client.open()
            (session,) = at.sessions
            right, other = plain(text, 2)
            for tree in (DraftTree(), DraftTree((right, other), (-1, 0))):
                at.work.put(session, DraftRequest(session.turn, len(text), tree, MAX_FURTHER))
                await asyncio.sleep(0)  # the task takes the first one
            for _ in range(2):  # the second request is answered, too
                told = (await client.receive()).verdict
                assert told.base == len(text)
                assert told.tokens == [right]
                assert told.dropped == [0, 1]
        await at.stop()

    asyncio.run(run())


def test_streams_of_one_owner_do_not_keep_others_waiting() -> None:
    """A stream has one request in the queue, as a device that asks for each token."""

    async def run() -> None:
        passes = PassOptions(max_rows=1, recent_s=600.0)
        sessions = StoreOptions(max_sessions=5, max_sessions_per_owner=4)
        at, served = service(passes=passes, sessions=sessions), list[str]()
        inner = at.shared._decide_together

        async def noted(jobs: Any) -> None:
            served.extend(job.owner for job in jobs)
            await inner(jobs)

        async with (
            connected(at, "mallory", 0) as first,
            connected(at, "mallory", 1) as second,
            connected(at, "mallory", 2) as third,
            connected(at, "alice") as client,
        ):
            greedy = (first, second, third)
            texts = [await one.open() for one in greedy]
            text = await client.open()
            at.shared._decide_together = noted  # type: ignore[method-assign]
            for one, of in zip(greedy, texts, strict=True):
                await one.send(draft=pb.Draft(base=len(of), further=MAX_FURTHER))
            await client.send(draft=pb.Draft(base=len(text), further=9))
            for _ in range(10):
                await client.receive()
        places = [place for place, owner in enumerate(served) if owner == "alice"]
        assert len(places) == 10
        assert all(after - before <= 2 for before, after in pairwise(places))
        await at.stop()

    asyncio.run(run())


def test_streams_take_no_further_places() -> None:
    async def run() -> None:
        at = service(sessions=StoreOptions(max_sessions=1, max_sessions_per_owner=1))
        async with connected(at) as client, connected(at, number=1) as another:
            text = await client.open()
            await client.send(draft=pb.Draft(base=len(text), further=MAX_FURTHER))
            await another.send(open=pb.Open())
            assert len(at.sessions) == 1
        await at.stop()

    asyncio.run(run())


# The device


def mixed(monkeypatch: pytest.MonkeyPatch, longest: int = 5) -> None:
    """Plain decoding is the fastest for every session, and pauses are short."""
    monkeypatch.setattr(link_policy, "MIN_PAUSE", 3)
    monkeypatch.setattr(link_policy, "MAX_PAUSE", longest)
    monkeypatch.setattr(RemoteSession, "_plain_s", lambda _: 1e-4)


def session_of(transport: Any, link: LinkOptions = PATIENT, **options: Any) -> RemoteSession:
    device = LocalDevice(tiny.target(), tiny.agreeing_drafter("llama"))
    return RemoteSession(device, transport, RemoteOptions(link=link, **options))


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
        session = session_of(transport, QUICK, draft_ahead=ahead)
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
    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("on_cut", ["rollback", "keep"])
def test_a_cut_in_the_middle_of_a_stream(
    on_cut: Any, setting: str, restart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link falls into a hole while the server streams, and provisional text is shown."""

    async def run() -> None:
        slow = PassOptions(min_pass_s=0.01)
        server = Restartable(lambda: service(passes=slow))
        transport = FaultyTransport(server.transport)
        calm = LinkOptions(**(vars(QUICK) | {"dead_after_s": 1.0, "connect_s": 5.0}))
        session = session_of(transport, calm, on_cut=on_cut)
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
    asyncio.run(run())


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

    monkeypatch.setattr(ServerSession, "max_further", 0)
    mixed(monkeypatch)
    asyncio.run(run())


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
    asyncio.run(run())


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

    asyncio.run(run())


def test_a_device_that_never_drafts_sends_no_drafts_after_a_cut() -> None:
    async def run() -> None:
        server = Restartable(lambda: service(passes=PassOptions(min_pass_s=0.01)))
        transport = FaultyTransport(server.transport)
        session = session_of(transport, replace(QUICK, dead_after_s=1.0, connect_s=5.0))
        options: Any = {"max_new_tokens": NEW, "tree": None}
        async for event in session.stream(PROMPT, **options):
            transport.hole = not session.stats.cuts and event.start > 5
        assert session.stats.cuts
        assert session.stats.provisional
        assert session.result.token_ids == plain(PROMPT)
        assert session.result.num_drafted == 0
        await session.close()
        await server.service.stop()

    asyncio.run(run())


def test_a_stop_token_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        server = Restartable(lambda: service(passes=PassOptions(min_pass_s=0.02)))
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
    asyncio.run(run())


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
            assert len(verifier._early) <= 1 + MAX_FURTHER
            verifier._early = late
        assert refused
        assert text == plain(PROMPT)
        await session.close()
        await server.service.stop()

    mixed(monkeypatch, 64)
    asyncio.run(run())


# The policy


def policy(
    wait_s: float, step_s: float | None, plain_s: float | None, *, ahead: bool = True
) -> LinkPolicy:
    return LinkPolicy(
        wait_s=lambda: wait_s, step_s=lambda: step_s, plain_s=lambda: plain_s, ahead=ahead
    )


def depths(of: LinkPolicy, count: int) -> list[int]:
    """Drafts of these rounds."""
    shapes = (of.shape(10, 1) for _ in range(count))
    return [0 if shape is None else shape.depth for shape in shapes]


def test_drafts_where_they_pay() -> None:
    assert min(depths(policy(0.16, 0.005, 0.15), 40)) > 1


@pytest.mark.parametrize("step_s", [0.2, 0.3, 0.5])
@pytest.mark.parametrize("ahead", [True, False])
def test_no_drafts_where_they_do_not(step_s: float, ahead: bool) -> None:
    """Trials take `MAX_LOSS` of the time, with the round trip after each."""
    plain_s, wait_s = 0.15, 0.2
    of = policy(wait_s, step_s, plain_s, ahead=ahead)
    found = depths(of, 5000)
    assert max(found[:MIN_PAUSE]) == 0
    trials = [depth for depth in found if depth]
    assert set(trials) == {1}
    tokens, round_s = (of_chains[0] for of_chains in of._rounds(wait_s))
    loss_s = len(trials) * (round_s + wait_s - (tokens + 1) * plain_s)
    total_s = plain_s * len(found)
    assert loss_s <= MAX_LOSS * total_s * 1.01


def test_drafts_that_never_pay_are_tried_after_the_longest_pause() -> None:
    found = depths(policy(0.2, 60.0, 0.15), 2 * MAX_PAUSE)
    assert [place for place, depth in enumerate(found) if depth] == [MAX_PAUSE]


def test_a_pause_ends_early_where_drafts_would_pay_by_now() -> None:
    """The tokens that the server already streams come first."""
    waits_s = [9.0]
    of = LinkPolicy(
        wait_s=lambda: waits_s[-1], step_s=lambda: 0.003, plain_s=lambda: 0.05, ahead=True
    )
    assert max(depths(of, 100)) == 0
    asked = of.pause
    assert asked > 4 * MAX_FURTHER
    waits_s.append(0.06)
    places = [place for place, depth in enumerate(depths(of, asked)) if depth]
    assert MAX_FURTHER <= places[0] <= 2 * MAX_FURTHER
    assert places == [*range(places[0], asked)]


def test_the_pause_says_what_follows() -> None:
    of = policy(0.2, 0.5, 0.15)
    before = 0
    for _ in range(1000):
        shape = of.shape(10, 1)
        assert shape is None or (before, of.pause) == (0, 0)
        before = of.pause


def test_a_step_is_measured_before_it_is_needed() -> None:
    assert depths(policy(0.2, None, 0.15), MIN_PAUSE) == [0] * MIN_PAUSE
    assert depths(policy(0.2, None, 0.15, ahead=False), MIN_PAUSE) == [0] * MIN_PAUSE
    assert depths(policy(0.2, None, None), 1) != [0]


@pytest.mark.parametrize("plenty_after", [2 * MIN_PAUSE, 10**6])
def test_few_steps_are_not_decided_by_for_some_time(plenty_after: int) -> None:
    drafts: list[int] = []
    of = LinkPolicy(
        wait_s=lambda: 0.16,
        step_s=lambda: 0.005,
        plain_s=lambda: 0.15,
        measuring=lambda: len(drafts) < plenty_after,
        ahead=True,
    )
    while len(drafts) < 40:
        drafts += depths(of, 1)
    first = min(plenty_after, 2 * MAX_MEASURING * MIN_PAUSE)
    assert max(drafts[:first]) == 0
    assert min(drafts[first:]) > 1


def test_rounds_without_drafts_tell_nothing() -> None:
    of = policy(0.2, 0.5, 0.15)
    before = of.speeds()
    of.record_round(DraftTree(), ())
    assert (of.speeds() == before).all()
