"""The server streams tokens that no request asks for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

import moaspec
import tiny
from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.drafting.protocols import VerifyRequest, VerifyResult
from moaspec_core.sampling.params import GREEDY, SamplingParams
from moaspec_core.support.limits import MAX_STREAMED
from moaspec_core.tokens.token_rules import TokenRules
from moaspec_edge.protocol import identity, wire
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol.transport import Connection, pipe
from moaspec_edge.server.server_session import DraftRequest, TurnRequest
from moaspec_edge.server.service import ServiceOptions, TargetService
from moaspec_edge.server.session_store import StoreOptions
from moaspec_edge.server.shared_verifier import PassOptions

PROMPT = list(tiny.PROMPTS[1])


def service(**options: Any) -> TargetService:
    return TargetService(tiny.target(), tiny.agreeing_drafter("llama"), ServiceOptions(**options))


def plain(prompt: list[int], number: int) -> list[int]:
    return moaspec.generate(tiny.target(), prompt, max_new_tokens=number).token_ids


class Client:
    """A device that says what a test wants."""

    def __init__(self, at: TargetService, connection: Connection, name: bytes) -> None:
        self._at, self._connection, self._name = at, connection, name

    async def send(self, **kind: Any) -> None:
        message = pb.ClientMessage(session=self._name, turn=1, **kind)
        await self._connection.send(message.SerializeToString())

    async def receive(self) -> pb.ServerMessage:
        return wire.parse(
            await asyncio.wait_for(self._connection.receive(), 60), pb.ServerMessage()
        )

    async def open(self, sampling: SamplingParams = GREEDY) -> list[int]:
        """Open the turn; returns the text with its first token."""
        opening = pb.Open(
            protocol=identity.PROTOCOL,
            sampling_version=identity.SAMPLING_VERSION,
            target=identity.to_message(tiny.target().identity),
            sampling=wire.sampling_message(sampling),
            token_ids=PROMPT,
            prompt_length=len(PROMPT),
        )
        await self.send(open=opening)
        self.verdict = (await self.receive()).verdict
        return [*PROMPT, *self.verdict.tokens]

    async def ask(self, text: list[int], further: int, tokens: tuple[int, ...] = ()) -> list[int]:
        """Send a `Draft`; returns the tokens of all verdicts until the server has none to send."""
        await self.send(draft=pb.Draft(base=len(text), tokens=tokens, further=further))
        found, over = list[int](), False
        (session,) = (one for one in self._at.sessions if one.name == self._name)
        while True:
            await self.send(heartbeat=pb.Heartbeat(number=1))
            told = await self.receive()
            while not told.HasField("heartbeat"):
                assert told.verdict.base == len(text) + len(found)
                found += told.verdict.tokens
                told = await self.receive()
            if over:  # so what it had to say came before the answer to this heartbeat
                return found
            over = session.task is None
            await asyncio.sleep(0.005)


@asynccontextmanager
async def connected(
    at: TargetService, owner: str = "alice", number: int = 0
) -> AsyncIterator[Client]:
    ours, theirs = pipe()
    serving = asyncio.create_task(at.converse(owner, theirs))
    try:
        yield Client(at, ours, bytes([*owner.encode()[:1], number] * 8))
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


@asynccontextmanager
async def streaming(
    sampling: SamplingParams = GREEDY, **options: Any
) -> AsyncIterator[tuple[TargetService, Client, list[int]]]:
    """A service with one device, whose turn is open: both, and the text so far."""
    at = service(**options)
    async with connected(at) as client:
        yield at, client, await client.open(sampling)
    await at.stop()


@pytest.mark.parametrize(
    ("further", "number"), [(0, 1), (3, 4), (MAX_STREAMED + 1, 1 + MAX_STREAMED), (2**32 - 1, 33)]
)
def test_how_many_are_streamed(further: int, number: int) -> None:
    async def run() -> None:
        async with streaming() as (_, client, text):
            assert client.verdict.max_further == MAX_STREAMED
            assert await client.ask(text, further) == plain(text, number)

    asyncio.run(run())


def test_drafts_are_verified_and_nothing_is_streamed() -> None:
    async def run() -> None:
        async with streaming() as (_, client, text):
            right, other = plain(text, 2)
            assert await client.ask(text, 9, (right,)) == [right, other]

    asyncio.run(run())


def test_a_text_that_the_server_does_not_have_is_not_streamed() -> None:
    async def run() -> None:
        async with streaming() as (_, client, text):
            await client.send(draft=pb.Draft(base=len(text) + 1000, further=MAX_STREAMED))
            assert (await client.receive()).problem.kind == pb.Problem.LOST
            assert await client.ask(text, 0) == plain(text, 1)

    asyncio.run(run())


def test_rules_forbid_streaming() -> None:
    """Behind the text's end, which only the device knows, they may allow no token."""

    async def run() -> None:
        rules = SamplingParams(rules=TokenRules(min_length=500))
        async with streaming(rules) as (_, client, text):
            assert client.verdict.max_further == 0
            assert len(await client.ask(text, MAX_STREAMED)) == 1

    asyncio.run(run())


def test_a_device_that_leaves_gets_no_more_passes() -> None:
    async def run() -> None:
        at = service(passes=PassOptions(min_pass_s=0.02))
        async with connected(at) as client:
            text = await client.open()
            await client.send(draft=pb.Draft(base=len(text), further=MAX_STREAMED))
            await client.receive()
        (session,) = at.sessions
        while session.task is not None:
            await asyncio.sleep(0.005)
        assert len(session.token_ids) < len(text) + MAX_STREAMED
        await at.stop()

    asyncio.run(run())


def test_a_request_replaces_the_number_at_once() -> None:
    """It is not answered by itself where the pass under way chooses its token."""

    async def run() -> None:
        async with streaming() as (at, client, text):
            (session,) = at.sessions
            decide, both_there = at.shared._decide, threading.Event()

            def decide_later(requests: list[VerifyRequest]) -> list[VerifyResult | Exception]:
                assert both_there.wait(60)
                return decide(requests)

            at.shared._decide = decide_later  # type: ignore[method-assign]
            await client.send(draft=pb.Draft(base=len(text), further=MAX_STREAMED))
            while not at.shared._running:
                await asyncio.sleep(0)
            await client.send(draft=pb.Draft(base=len(text), further=2))
            await client.send(heartbeat=pb.Heartbeat(number=1))
            assert (await client.receive()).HasField("heartbeat")
            both_there.set()
            while session.task is not None:
                await asyncio.sleep(0.005)
            assert session.token_ids[len(text) :] == plain(text, 3)
            told = [(await client.receive()).verdict.base for _ in range(3)]
            assert told == [len(text) + i for i in range(3)]

    asyncio.run(run())


def test_streamed_tokens_are_sent_again_only_where_a_request_is_repeated() -> None:
    """A device may ask for each token long after it was streamed."""

    async def run() -> None:
        async with streaming() as (_, client, text):
            found = await client.ask(text, 5)
            for number in (1, 2, 3, 4, 5):
                await client.send(draft=pb.Draft(base=len(text) + number))
            await client.send(heartbeat=pb.Heartbeat(number=1))
            assert (await client.receive()).HasField("heartbeat")
            assert await client.ask([*text, *found[:2]], 0) == found[2:]

    asyncio.run(run())


def test_a_request_that_comes_with_an_older_one_is_answered() -> None:
    """The task has not begun, and would run the older one only."""

    async def run() -> None:
        async with streaming() as (at, client, text):
            (session,) = at.sessions
            right, other = plain(text, 2)
            for base, tree in (
                (len(text) - 1, DraftTree()),
                (len(text), DraftTree((right,), (-1,))),
            ):
                at.work.put(session, DraftRequest(session.turn, base, tree))
            assert (await client.receive()).verdict.tokens == [right, other]

    asyncio.run(run())


def test_drafts_that_come_during_a_plain_pass_are_not_verified() -> None:
    """The device is told, so that it does not take them for wrong."""

    async def run() -> None:
        async with streaming() as (at, client, text):
            (session,) = at.sessions
            right, other = plain(text, 2)
            for tree in (DraftTree(), DraftTree((right, other), (-1, 0))):
                at.work.put(session, DraftRequest(session.turn, len(text), tree, MAX_STREAMED))
                await asyncio.sleep(0)  # the task takes the first one
            for _ in range(2):  # the second request is answered, too
                told = (await client.receive()).verdict
                assert told.base == len(text)
                assert told.tokens == [right]
                assert told.dropped == [0, 1]

    asyncio.run(run())


def test_streams_of_one_owner_do_not_keep_others_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stream has one request in the queue, as a device that asks for each token."""
    monkeypatch.setattr("moaspec_edge.server.shared_verifier.RECENT_S", 600.0)

    async def run() -> None:
        passes = PassOptions(max_rows=1)
        sessions = StoreOptions(max_sessions=5, max_sessions_per_owner=4)
        at, served = service(passes=passes, sessions=sessions), list[str]()
        inner = at.shared._decide_together

        async def noted(jobs: Any) -> None:
            served.extend(job.share_key for job in jobs)
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
                await one.send(draft=pb.Draft(base=len(of), further=MAX_STREAMED))
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
            await client.send(draft=pb.Draft(base=len(text), further=MAX_STREAMED))
            await another.send(open=pb.Open())
            assert len(at.sessions) == 1
        await at.stop()

    asyncio.run(run())


def test_a_prompt_is_not_read_on_for_a_device_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read stays, and is gone on from when the device is back."""
    monkeypatch.setattr("moaspec_edge.server.shared_verifier.PREFILL_TOKENS", 7)
    prompt = tuple(PROMPT) * 4
    opening = TurnRequest(
        turn=1,
        token_ids=prompt,
        prompt_length=len(prompt),
        sampling=GREEDY,
        grammar="",
        asked=None,
    )

    async def run() -> None:
        at = service()
        session = at.sessions.create(b"x" * 16, "alice")
        at.work.put(session, opening)
        assert session.task is not None
        await session.task
        assert (session.num_verified, at.shared.counts.passes) == (7, 1)
        stream: Any = SimpleNamespace(more=lambda: None, answer=lambda _: None, session=None)
        session.attach(stream)
        at.work.go_on(session)
        await session.task
        assert session.token_ids == [*prompt, *plain(list(prompt), 1)]
        assert at.shared.counts.passes == -(-len(prompt) // 7)
        session.stream = None
        await at.stop()

    asyncio.run(run())
