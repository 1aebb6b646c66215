"""No client takes another's passes or places."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moaspec
import tiny
from moaspec.engine.local_verifier import CPU_CLIENT_ROWS, CPU_CLIENT_TOKENS, LocalVerifier
from moaspec.target.target import Target
from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.drafting.protocols import TextProposer, Verifier, VerifyRequest, VerifyResult
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.sampling.params import GREEDY, SamplingParams
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol.transport import InProcessTransport
from moaspec_edge.protocol.wire import chain
from moaspec_edge.server.auth import ANONYMOUS
from moaspec_edge.server.service import TargetService, wire_encoder
from moaspec_edge.server.session_store import NoRoomError, StoreOptions
from moaspec_edge.server.shared_verifier import (
    OWNER_DRAFTED,
    PREFILL_TOKENS,
    PassOptions,
    SharedVerifier,
    _QueuedRequest,
)
from simulated_time import run_simulated

TOKEN_S = 0.002
PASS_S = CPU_CLIENT_TOKENS * TOKEN_S
"""A CPU's: a pass reads all weights in the time of so many tokens."""


@pytest.fixture(autouse=True)
def _all_are_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is."""
    monkeypatch.setattr("moaspec_edge.server.shared_verifier.RECENT_S", 600.0)


class Unused(Verifier):
    """A verifier that is never asked."""

    async def verify(self, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
        raise NotImplementedError

    def close(self, row: int) -> None: ...


def tree(length: int) -> DraftTree:
    return chain(range(length))


def asked(shared: SharedVerifier, owner: str, drafted: int, number: int = 1) -> None:
    """Requests of new rows that wait."""
    for _ in range(number):
        wait(shared, shared.lease(owner), drafted)


def wait(shared: SharedVerifier, row: int, drafted: int) -> None:
    request = VerifyRequest(row, 0, (1,), tree(drafted), GREEDY, 1, False)
    share_key, answer = shared._share_keys[row], asyncio.get_running_loop().create_future()
    shared._asked_s[share_key] = time.monotonic()
    shared._jobs.append(_QueuedRequest(request, share_key, answer))


def passes(*owners: tuple[str, int, int], **options: int) -> list[list[tuple[str, int]]]:
    """Owner and drafted tokens of the requests in each pass, until nobody waits."""

    async def run() -> list[list[tuple[str, int]]]:
        shared = SharedVerifier(Unused(), PassOptions(**options))
        for owner, drafted, number in owners:
            asked(shared, owner, drafted, number)
        made = []
        while jobs := shared._next():
            made.append([(job.share_key, job.drafted) for job in jobs])
            shared.counts.passes += 1
        return made

    return asyncio.run(run())


def test_rows_that_ask_again_at_once_share_the_next_pass() -> None:
    """Else rows that once parted would take turns for ever, each in passes of its own."""
    made, both = list[int](), threading.Event()

    class Instant(Unused):
        async def verify(self, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
            both.wait(60)
            made.append(len(requests))
            return [VerifyResult((), 1)] * len(requests)

    async def write(shared: SharedVerifier) -> None:
        row = shared.lease()
        for place in range(5):
            await shared.decide(VerifyRequest(row, place, (1,), DraftTree(), GREEDY, 1, False))

    async def run() -> None:
        shared = SharedVerifier(Instant())
        first = asyncio.create_task(write(shared))
        while not shared._running:
            await asyncio.sleep(0)
        second = asyncio.create_task(write(shared))
        await asyncio.sleep(0)
        both.set()
        await asyncio.gather(first, second)
        await shared.stop()

    asyncio.run(run())
    assert made == [1, 2, 2, 2, 2, 1]


def test_large_drafts_of_one_owner_take_a_share_of_a_pass() -> None:
    first, *later = passes(("mallory", 256, 16), ("alice", 8, 1))
    assert sorted(first) == [("alice", 8), ("mallory", 64)]
    assert later == [[("mallory", 64)]] * 15


def test_large_drafts_of_a_text_without_credentials_take_a_share_of_a_pass() -> None:
    """Else one device's drafts would make the rounds of all others as long as its own."""
    first, *later = passes((ANONYMOUS, 256, 4), (ANONYMOUS, 8, 1), owner_tokens=16)
    assert [drafted for _, drafted in first] == [15, 15, 15, 15, 8]
    assert not later


def test_of_devices_without_credentials_the_one_whose_turn_was_longest_ago_comes_first() -> None:
    async def run() -> list[int]:
        shared, order = SharedVerifier(Unused(), PassOptions(max_rows=1)), list[int]()
        rows = [shared.lease(ANONYMOUS) for _ in range(3)]
        for row in (*rows[:2], *rows):  # the first two ask twice before the third asks
            wait(shared, row, 1)
            if row in rows[:2] and len(order) < 2:
                order += [job.request.cache_row for job in shared._next()]
                shared.counts.passes += 1
        while jobs := shared._next():
            order += [job.request.cache_row for job in jobs]
            shared.counts.passes += 1
        return order

    assert asyncio.run(run()) == [0, 1, 2, 0, 1]


def test_a_text_that_has_ended_leaves_the_others_whole_passes() -> None:
    async def run() -> list[int]:
        shared = SharedVerifier(Unused(), PassOptions(owner_tokens=16))
        first, second = shared.lease(ANONYMOUS), shared.lease(ANONYMOUS)
        wait(shared, first, 1)
        shared._next()
        shared.close(first)
        wait(shared, second, 256)
        return [job.drafted for job in shared._next()]

    assert asyncio.run(run()) == [256]


def test_an_owner_with_many_rows_takes_a_share_of_a_pass() -> None:
    """Else each pass of the others would be longer by all of them."""
    first, *later = passes(("mallory", 1, 12), ("alice", 1, 1), owner_rows=4)
    assert sorted(first) == [("alice", 1)] + [("mallory", 1)] * 4
    assert [len(one) for one in later] == [4] * 2
    (all_at_once,) = passes(*((str(owner), 1, 6) for owner in range(8)), owner_rows=1)
    assert len(all_at_once) == 48


def test_on_a_cpu_rows_and_tokens_of_one_owner_are_limited() -> None:
    service = TargetService(tiny.target(), options=None)
    assert service.shared.options.owner_rows == CPU_CLIENT_ROWS
    assert service.shared.options.owner_tokens == CPU_CLIENT_TOKENS


def test_a_long_prompt_lets_others_of_its_owner_pass() -> None:
    """What remains of it goes behind the prompts that wait."""
    made: list[list[int]] = []

    class Instant(Unused):
        async def verify(self, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
            made.append([one.cache_row for one in requests])
            return [VerifyResult((), 1)] * len(requests)

    async def run() -> None:
        shared = SharedVerifier(Instant())
        prompts = [(shared.lease(), range(length)) for length in (2000, 100)]
        asked = [VerifyRequest(row, 0, tuple(p), DraftTree(), GREEDY, len(p)) for row, p in prompts]
        await asyncio.gather(*map(shared.decide, asked))
        await shared.stop()

    asyncio.run(run())
    assert [1] in made[:2]
    assert len(made) == 1 + -(-2000 // PREFILL_TOKENS)


def test_tokens_of_one_owner_take_a_share_of_a_pass() -> None:
    """More of a draft is cut, more of a text waits for the next pass."""
    first, *later = passes(("mallory", 40, 2), ("alice", 20, 1), owner_tokens=16)
    assert sorted(first) == [("alice", 15), ("mallory", 15)]
    assert later == [[("mallory", 15)]]


def test_drafts_that_are_cut_do_not_count_against_the_limit() -> None:
    """Ten drafts and then sixty: four of these have room, which is within the limit of 64."""

    async def run() -> list[tuple[str, int]]:
        shared = SharedVerifier(Unused(), PassOptions(owner_tokens=16))
        for owner, drafted in (("bob", 10), ("bob", 60), ("alice", 1)):
            asked(shared, owner, drafted)
        return [(job.share_key, job.drafted) for job in shared._next()]

    assert asyncio.run(run()) == [("bob", 10), ("alice", 1), ("bob", 4)]


def test_tokens_are_not_limited_for_an_owner_who_is_idle() -> None:
    """Only owners who wait, or were in the last two passes, make the parts of a text small."""

    async def lengths(last_pass: int) -> list[int]:
        shared = SharedVerifier(Unused(), PassOptions(owner_tokens=16))
        shared._asked_s["alice"] = time.monotonic()
        shared._latest_pass["alice"], shared.counts.passes = last_pass, 10
        row = shared.lease("bob")
        request = VerifyRequest(row, 0, (1,) * 100, DraftTree(), GREEDY, 100, False)
        answer = asyncio.get_running_loop().create_future()
        shared._jobs.append(_QueuedRequest(request, "bob", answer))
        return [len(job.request.new_tokens) for job in shared._next()]

    assert [asyncio.run(lengths(last_pass)) for last_pass in (8, 9, 10)] == [[100], [16], [16]]


@pytest.mark.slow
@pytest.mark.parametrize("encode", [False, True])
def test_a_text_that_is_split_is_verified_as_a_whole_one(encode: bool) -> None:
    """Its parts are encoded with the last one, and only that one chooses a token."""
    target = tiny.target()
    drafter = tiny.random_drafter(target)
    prompt = tuple(number % tiny.VOCAB for number in range(50))
    request = VerifyRequest(0, 0, prompt, tree(3), GREEDY, len(prompt), encode)

    async def run(owner_tokens: int) -> tuple[VerifyResult, int]:
        encoder: Any = wire_encoder(drafter, target)
        verifier = LocalVerifier(target, encoder)
        shared = SharedVerifier(verifier, PassOptions(owner_tokens=owner_tokens))
        shared._asked_s["alice"] = time.monotonic()
        shared._latest_pass["alice"] = 1000  # she is in every pass
        assert shared.lease("bob") == 0
        verdict, _ = await shared.decide(request)
        shared.close(0)
        await shared.stop()
        return verdict, shared.counts.passes

    whole, one = asyncio.run(run(1000))
    split, several = asyncio.run(run(16))
    assert (one, several) == (1, 4)
    assert (split.accepted, split.next_token) == (whole.accepted, whole.next_token)
    assert (whole.features is not None) is encode
    # Passes of other widths add up in another order.
    torch.testing.assert_close(split.features, whole.features, atol=1e-5, rtol=1e-4)


class Noise(TextProposer):
    """Drafts what the target never writes, as long as is asked for."""

    def draft(self, token_ids: Sequence[int], shape: Tree) -> DraftTree:  # noqa: ARG002
        return chain([0] * shape.depth)


async def write_texts(
    service: TargetService,
    owner: str,
    prompts: Sequence[Sequence[int]],
    depth: int,
    new_tokens: int = 12,
) -> None:
    """A device that opens a session for each text."""
    device = LocalDevice(tiny.target(), Noise())
    options = RemoteOptions(draft=Chain(depth), draft_ahead=False, retry_s=60.0)
    for prompt in prompts:
        session = RemoteSession(device, InProcessTransport(service, owner), options)
        try:
            await session.generate(prompt, max_new_tokens=new_tokens, stop_token_ids=())
        finally:
            await session.close()


def record_waits(
    service: TargetService, waited: list[float], counts: Callable[[VerifyRequest], bool]
) -> None:
    """Add the simulated seconds of each request that counts to `waited`."""
    decide = service.shared.decide

    async def timed(request: VerifyRequest) -> tuple[VerifyResult, float]:
        started_s = time.monotonic()
        answer = await decide(request)
        if counts(request):
            waited.append(time.monotonic() - started_s)
        return answer

    service.shared.decide = timed  # type: ignore[method-assign]


def seconds_waited(bob: int, depth: int, length: int) -> list[float]:
    """How long alice's rounds wait beside so many devices of bob, in simulated time."""
    waited: list[float] = []

    async def run() -> None:
        service = TargetService(tiny.target())
        used = service.shared._used
        record_waits(service, waited, lambda request: used.get(request.cache_row) == "alice")
        short = [[number, 1, 2, 3, 4, 5, 6, 7] for number in range(8)]
        long = [[number % tiny.VOCAB] * length for number in range(10_000)]
        others = [asyncio.create_task(write_texts(service, "bob", long, depth)) for _ in range(bob)]
        await asyncio.gather(*(write_texts(service, "alice", short, 4) for _ in range(4)))
        for one in others:
            one.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await service.stop()

    run_simulated(run(), PASS_S, TOKEN_S)
    return waited


@pytest.mark.slow
def test_a_flood_makes_another_tenant_wait_for_at_most_half_as_much_again() -> None:
    before = quantiles(seconds_waited(bob=4, depth=4, length=8), n=100)[98]
    flooded = quantiles(seconds_waited(bob=28, depth=60, length=100), n=100)[98]
    assert flooded <= 1.5 * before, (flooded, before)


@pytest.mark.slow
@pytest.mark.parametrize("owners", [("alice", "a", "b", "c", "d"), (ANONYMOUS,) * 5])
def test_beside_busy_owners_a_round_waits_for_a_share_of_each(owners: Sequence[str]) -> None:
    """Also where each text counts as an owner, since nobody tells devices apart."""

    def waited(busy: Sequence[str]) -> float:
        passes_s: list[float] = []

        async def run() -> None:
            service = TargetService(tiny.target())
            record_waits(service, passes_s, lambda request: request.prompt_length == 8)
            others = [
                asyncio.create_task(write_texts(service, one, [[7] * 20] * 1000, 60, 100))
                for one in busy
            ]
            await write_texts(service, owners[0], [list(range(8))] * 2, 4)
            for one in others:
                one.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await service.stop()

        run_simulated(run(), PASS_S, TOKEN_S)
        return median(passes_s)

    alone, busy = waited(()), waited(owners[1:])
    assert busy <= len(owners) * alone, (busy, alone)


def test_an_owner_alone_has_whole_passes() -> None:
    assert passes(("alice", 256, 4)) == [[("alice", 256)] * 4]
    assert passes(("alice", 256, 6)) == [[("alice", 256)] * 4, [("alice", 256)] * 2]


def test_owners_take_turns_where_a_pass_has_few_rows() -> None:
    made = passes(("mallory", 1, 6), ("alice", 1, 1), ("bob", 1, 2), max_rows=2)
    assert [[owner for owner, _ in one] for one in made[:2]] == [
        ["mallory", "alice"],
        ["bob", "mallory"],
    ]
    assert sum(map(len, made)) == 9


class Recording(LocalVerifier):
    """Remembers how many drafted tokens each row has in each pass."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.passes: list[list[int]] = []

    async def verify(self, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
        self.passes.append([len(one.tree.tokens) for one in requests])
        return await super().verify(requests)


LENGTH = 200


def drafted_tree(text: Sequence[int], at: int) -> DraftTree:
    """Right drafts of a text, with a wrong branch at every fourth token, and wrong ones in the end.

    Of its first 64 nodes some are right; more are right than those.
    """
    tokens, parents, right = [], [], -1
    for depth, token in enumerate([*text[at : at + 100], *[0] * 60]):
        if depth % 4 == 0:
            tokens.append((token + 1) % tiny.VOCAB)
            parents.append(right)
        tokens.append(token)
        parents.append(right)
        right = len(tokens) - 1
    return DraftTree(tuple(tokens), tuple(parents))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_cut_drafts_of_several_owners_change_no_text(temperature: float) -> None:
    """Each is cut to its owner's share, in passes with those of others, and decided as without."""
    target = tiny.target()
    sampling = SamplingParams(temperature=temperature, seed=3 if temperature else None)
    plain = [
        moaspec.generate(
            target, prompt, max_new_tokens=LENGTH, temperature=temperature, seed=sampling.seed
        ).token_ids
        for prompt in tiny.PROMPTS
    ]

    async def write(shared: SharedVerifier, number: int) -> list[int]:
        prompt = tiny.PROMPTS[number]
        row = shared.lease(f"owner {number % 3}")
        known: Sequence[int] = prompt
        text, base, tree = list(prompt), 0, DraftTree()
        while len(text) < len(prompt) + LENGTH:
            request = VerifyRequest(row, base, tuple(known), tree, sampling, len(prompt), False)
            verdict, _ = await shared.decide(request)
            assert verdict.tree is not None
            accepted = [verdict.tree.tokens[node] for node in verdict.accepted]
            base += len(known) + len(accepted)
            known = [verdict.next_token]
            text += [*accepted, verdict.next_token]
            tree = drafted_tree(plain[number], len(text) - len(prompt))
        shared.close(row)
        return text[len(prompt) :][:LENGTH]

    async def run() -> tuple[list[list[int]], Recording]:
        recording = Recording(target)
        shared = SharedVerifier(recording)
        texts = await asyncio.gather(*(write(shared, i) for i in range(len(tiny.PROMPTS))))
        await shared.stop()
        return texts, recording

    texts, recording = asyncio.run(run())
    assert texts == plain
    several = [one.count(OWNER_DRAFTED) for one in recording.passes]
    assert max(several) > 1, "no pass had several cut drafts"
    assert len(recording.passes) < LENGTH, "nothing was accepted"


@pytest.mark.parametrize(("owner", "share"), [("mallory", 4), ("anonymous", 8)])
def test_an_owner_has_a_share_of_the_sessions(owner: str, share: int) -> None:
    async def run() -> None:
        service = TargetService(tiny.target(), options=None)
        service._room = StoreOptions(max_sessions=8)
        service.sessions._options = service._room
        for number in range(share):
            service.sessions.create(bytes([number]) * 16, owner)
        with pytest.raises(NoRoomError):
            service.sessions.create(bytes(16), owner)
        request = pb.GenerateRequest(
            token_ids=[1], sampling=pb.Sampling(top_p=1.0, repetition_penalty=1.0)
        )
        with pytest.raises(NoRoomError):
            await anext(service.generate(owner, request))
        if owner != "anonymous":
            service.sessions.create(b"x" * 16, "alice")
        await service.stop()

    asyncio.run(run())


@pytest.mark.slow
def test_grammars_of_one_owner_wait_for_one_another() -> None:
    """So that those of others are compiled meanwhile."""
    service, alice_is_done = TargetService(tiny.target()), threading.Event()
    running: Counter[str] = Counter()
    most: Counter[str] = Counter()

    class Slow:
        def compiled(self, owner: str) -> Any:
            running[owner] += 1
            most[owner] = max(most[owner], running[owner])
            if owner == "mallory":
                assert alice_is_done.wait(60)
            running[owner] -= 1
            return SimpleNamespace(processor=lambda _: lambda _, logits_V: logits_V)

    async def run() -> None:
        grammars: Any = Slow()
        service.capabilities._grammars = grammars
        with_grammar = service.capabilities.with_grammar
        hostile = [
            asyncio.create_task(with_grammar(GREEDY, "mallory", 1, "mallory")) for _ in range(50)
        ]
        await asyncio.sleep(0)
        await with_grammar(GREEDY, "alice", 1, "alice")
        assert not any(one.done() for one in hostile)
        alice_is_done.set()
        await asyncio.gather(*hostile)
        await service.stop()
        assert not service.capabilities._turns

    asyncio.run(run())
    assert most == {"mallory": 1, "alice": 1}
