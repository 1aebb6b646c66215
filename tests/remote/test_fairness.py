"""No client takes another's passes or places."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

import tiny
from moaspec.decode.protocols import Request, Verdict
from moaspec.decode.sampling import GREEDY
from moaspec.decode.tree import DraftTree
from moaspec.remote import PassOptions, StoreOptions, TargetService
from moaspec.remote import target_pb2 as pb
from moaspec.remote.shared import SharedVerifier, _Job
from moaspec.remote.store import NoRoomError
from moaspec.remote.wire import chain


class Unused:
    """A verifier that is never asked."""

    async def verify(self, requests: Sequence[Request]) -> list[Verdict]:
        raise NotImplementedError

    def close(self, row: int) -> None: ...


def tree(length: int) -> DraftTree:
    return chain(range(length))


def asked(shared: SharedVerifier, owner: str, drafted: int, number: int = 1) -> None:
    """Requests that wait."""
    shared._asked_s[owner] = time.monotonic()
    for _ in range(number):
        row = shared.lease(owner)
        request = Request(row, 0, (1,), tree(drafted), GREEDY, 1, False)
        shared._jobs.append(_Job(request, owner, asyncio.get_running_loop().create_future()))


def passes(*owners: tuple[str, int, int], **options: int) -> list[list[tuple[str, int]]]:
    """Owner and drafted tokens of the requests in each pass, until nobody waits."""

    async def run() -> list[list[tuple[str, int]]]:
        shared = SharedVerifier(Unused(), PassOptions(lately_s=600.0, **options))
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


def test_a_cut_draft_changes_no_text() -> None:
    """The first nodes of a tree are a tree; the target decides the same after them."""
    target = tiny.target()

    async def run() -> list[list[int]]:
        texts = []
        for others in ((), ("bob",)):
            service = TargetService(target)
            for other in others:  # has asked lately
                service.shared._asked_s[other] = float("inf")
            request = pb.GenerateRequest(
                token_ids=tiny.PROMPTS[0],
                max_new_tokens=12,
                sampling=pb.Sampling(top_p=1.0, repetition_penalty=1.0),
            )
            chunks = [one.token_ids async for one in service.generate("alice", request)]
            texts.append([token for chunk in chunks for token in chunk])
            await service.stop()
        return texts

    plain, cut = asyncio.run(run())
    assert plain == cut


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
