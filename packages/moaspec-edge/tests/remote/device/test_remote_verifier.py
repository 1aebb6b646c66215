"""Verdicts on requests that were sent more than once."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

import moaspec
import tiny
from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.drafting.protocols import VerifyRequest, VerifyResult
from moaspec_core.sampling.params import GREEDY
from moaspec_edge.device.draft_ahead import AheadDrafter
from moaspec_edge.device.events import LinkStats, now
from moaspec_edge.device.remote_verifier import RemoteVerifier
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol.wire import chain


def verdict_on(
    sent: DraftTree, longer: Sequence[int] | None, *, lost: bool = False
) -> tuple[VerifyResult, RemoteVerifier]:
    """The result of a verdict that accepts 5 and 6 and drops node 2 of the first tree.

    With `longer`, the link is lost before, and the device sends these drafts on the next one. With
    `lost`, the server has forgotten the session.
    """

    async def run() -> tuple[VerifyResult, RemoteVerifier]:
        proposer: Any = moaspec.NgramProposer()
        ahead = AheadDrafter(proposer, needs_memory=False, clock=now)
        target: Any = tiny.target()
        verifier = RemoteVerifier(
            ahead,
            target=target,
            opening=pb.Open(),
            memory=None,
            meanwhile=lambda _: False,
            num_streamed=lambda: 0,
            observe=lambda _: None,
            keep=False,
            retry_s=0.5,
        )
        messages: list[pb.ClientMessage] = []
        link: Any = SimpleNamespace(stats=LinkStats(state="up"), refused=None, send=messages.append)
        verifier.link, verifier.text, verifier._committed = link, [1, 2], [1, 2, 3]
        request = VerifyRequest(0, 2, (3,), sent, GREEDY, 1, False)
        waiting = asyncio.create_task(verifier.verify([request]))
        while not messages:
            await asyncio.sleep(0)
        if longer is not None:
            ahead.expected = [1, 2, 3, *longer]
            verifier.connected()
            assert list(messages[-1].draft.tokens) == list(longer)
        if lost:
            verifier.receive(pb.ServerMessage(problem=pb.Problem(kind=pb.Problem.LOST)))
        verdict = pb.Verdict(base=3, tokens=[5, 6, 9], dropped=[2])
        verifier.receive(pb.ServerMessage(turn=verifier.turn, verdict=verdict))
        (result,) = await waiting
        return result, verifier

    return asyncio.run(run())


SENT = DraftTree((5, 6, 7), (-1, 0, 0))


@pytest.mark.parametrize(
    ("longer", "tree"),
    [
        (None, DraftTree((5, 6), (-1, 0))),
        ([5, 6, 9, 8], SENT),  # node 2 of this chain was not dropped
    ],
)
def test_dropped_nodes_belong_to_the_tree_of_one_sending(
    longer: list[int] | None, tree: DraftTree
) -> None:
    result, _ = verdict_on(SENT, longer)
    assert result.tree is not None
    assert (result.tree.tokens, result.tree.parents) == (tree.tokens, tree.parents)
    assert (result.accepted, result.next_token) == ((0, 1), 9)


def test_drafts_after_a_cut_keep_what_the_server_accepted() -> None:
    """The server drops a node of the first tree; the second one has an accepted token there."""
    result, _ = verdict_on(chain([5]), [5, 6, 9, 8])
    assert result.tree is not None
    assert result.tree.tokens == (5, 6, 9, 8)


@pytest.mark.parametrize(
    ("sent", "longer", "lost", "counts"),
    [
        (SENT, None, False, True),
        (SENT, [5, 6, 9, 8], False, False),
        (SENT, None, True, False),
        (chain([]), None, False, False),
        (chain([]), [5, 6, 9, 8], False, False),
    ],
)
def test_rounds_that_tell_what_drafts_gain(
    sent: DraftTree, longer: list[int] | None, lost: bool, counts: bool
) -> None:
    """Requests with drafts that no cut, and no server, had sent again."""
    _, verifier = verdict_on(sent, longer, lost=lost)
    assert verifier.counts is counts
    assert verifier.link.stats.rounds[-1].repeated is (lost or longer is not None)
    assert bool(verifier.link.stats.wait_s) is counts
