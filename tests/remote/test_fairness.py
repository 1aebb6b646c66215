"""No client takes another's passes or places."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

import moaspec
import tiny
from moaspec.drafting.draft_tree import DraftTree
from moaspec.drafting.protocols import VerifyRequest, VerifyResult
from moaspec.engine.large_batches import CPU_CLIENT_ROWS
from moaspec.engine.local_verifier import LocalVerifier
from moaspec.remote.protocol import target_pb2 as pb
from moaspec.remote.protocol.wire import chain
from moaspec.remote.server.service import TargetService
from moaspec.remote.server.session_store import NoRoomError, StoreOptions
from moaspec.remote.server.shared_verifier import PassOptions, SharedVerifier, _QueuedRequest
from moaspec.sampling.params import GREEDY, SamplingParams
from moaspec.target.target import Target


class Unused:
    """A verifier that is never asked."""

    async def verify(self, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
        raise NotImplementedError

    def close(self, row: int) -> None: ...


def tree(length: int) -> DraftTree:
    return chain(range(length))


def asked(shared: SharedVerifier, owner: str, drafted: int, number: int = 1) -> None:
    """Requests that wait."""
    shared._asked_s[owner] = time.monotonic()
    for _ in range(number):
        row = shared.lease(owner)
        request = VerifyRequest(row, 0, (1,), tree(drafted), GREEDY, 1, False)
        shared._jobs.append(
            _QueuedRequest(request, owner, asyncio.get_running_loop().create_future())
        )


def passes(*owners: tuple[str, int, int], **options: int) -> list[list[tuple[str, int]]]:
    """Owner and drafted tokens of the requests in each pass, until nobody waits."""

    async def run() -> list[list[tuple[str, int]]]:
        shared = SharedVerifier(Unused(), PassOptions(recent_s=600.0, **options))
        for owner, drafted, number in owners:
            asked(shared, owner, drafted, number)
        made = []
        while jobs := shared._next():
            made.append([(job.owner, job.drafted) for job in jobs])
            shared.counts.passes += 1
        return made

    return asyncio.run(run())


def test_large_drafts_of_one_owner_take_a_share_of_a_pass() -> None:
    first, *later = passes(("mallory", 256, 16), ("alice", 8, 1))
    assert sorted(first) == [("alice", 8), ("mallory", 64)]
    assert later == [[("mallory", 64)]] * 15


def test_an_owner_with_many_rows_takes_a_share_of_a_pass() -> None:
    """Else each pass of the others would be longer by all of them."""
    first, *later = passes(("mallory", 1, 12), ("alice", 1, 1), owner_rows=4)
    assert sorted(first) == [("alice", 1)] + [("mallory", 1)] * 4
    assert [len(one) for one in later] == [4] * 2
    (all_at_once,) = passes(*((str(owner), 1, 6) for owner in range(8)), owner_rows=1)
    assert len(all_at_once) == 48


def test_on_a_cpu_rows_of_one_owner_are_limited() -> None:
    service = TargetService(tiny.target(), options=None)
    assert service.shared.options.owner_rows == CPU_CLIENT_ROWS


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
            cut = tree.tokens[: shared.options.owner_drafted]
            accepted = [cut[node] for node in verdict.accepted]
            base += len(known) + len(accepted)
            known = [verdict.next_token]
            text += [*accepted, verdict.next_token]
            tree = drafted_tree(plain[number], len(text) - len(prompt))
        shared.close(row)
        return text[len(prompt) :][:LENGTH]

    async def run() -> tuple[list[list[int]], Recording]:
        recording = Recording(target)
        shared = SharedVerifier(recording, PassOptions(recent_s=600.0))
        texts = await asyncio.gather(*(write(shared, i) for i in range(len(tiny.PROMPTS))))
        await shared.stop()
        return texts, recording

    texts, recording = asyncio.run(run())
    assert texts == plain
    most = PassOptions().owner_drafted
    assert max(drafted for one in recording.passes for drafted in one) == most
    assert any(one.count(most) > 1 for one in recording.passes), "no pass had several cut drafts"
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
    service = TargetService(tiny.target())
    running: Counter[str] = Counter()
    most: Counter[str] = Counter()

    class Slow:
        def processor(self, owner: str, _: int) -> Any:
            running[owner] += 1
            most[owner] = max(most[owner], running[owner])
            if owner == "mallory":
                time.sleep(0.02)
            running[owner] -= 1
            return lambda _, logits_V: logits_V

    async def run() -> None:
        grammars: Any = Slow()
        service.capabilities._grammars = grammars
        with_grammar = service.capabilities.with_grammar
        hostile = [
            asyncio.create_task(with_grammar(GREEDY, "mallory", 1, "mallory")) for _ in range(50)
        ]
        await asyncio.sleep(0)
        await with_grammar(GREEDY, "alice", 1, "alice")
        assert not all(one.done() for one in hostile)
        await asyncio.gather(*hostile)
        await service.stop()
        assert not service.capabilities._turns

    asyncio.run(run())
    assert most == {"mallory": 1, "alice": 1}
