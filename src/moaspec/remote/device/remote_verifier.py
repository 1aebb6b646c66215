"""The verifier whose target is across a network.

For the engine it is a `Verifier` like any other, only that its verdicts take their time: whatever
the link does meanwhile, a request is repeated until it is answered. What the server answers depends
on the text alone, so repetitions change nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moaspec.drafting.draft_tree import DraftTree, children
from moaspec.drafting.protocols import VerifyRequest, VerifyResult
from moaspec.errors import RefusedError, WireError
from moaspec.remote.device.draft_ahead import AheadDrafter
from moaspec.remote.device.events import LinkStats, RoundTrip, now
from moaspec.remote.device.link import ServerLink
from moaspec.remote.protocol import target_pb2 as pb
from moaspec.remote.protocol import wire

POLL_S = 0.25
"""A waiting request looks at its link at least so often."""

MAX_SERVER_S = 30.0
"""Longest time that a server is believed to need, or to want to be left alone."""

FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 2.0
"""Of a server that does not verify: before the second time that it is asked again, and at most."""

FETCH_AFTER = 2
"""Activations that are missing so many `retry_s` after the latest came are asked for again."""


@dataclass(eq=False)
class PendingRequest:
    """A request that waits for its answer.

    Attributes:
        request: the engine's.
        opening: whether it begins a turn.
        answer: what the engine will get.
        tree: the drafts as they were sent last.
        kept: provisional tokens that became part of the text without being asked for.
        resent: whether the link was lost since the request was made.
        put_off: how often the server did not verify it.
        first_s: when it was sent first.
        due_s: when it is sent again.
    """

    request: VerifyRequest
    opening: bool
    answer: asyncio.Future[VerifyResult]
    tree: DraftTree
    kept: list[int] = field(default_factory=list)
    resent: bool = False
    put_off: int = 0
    first_s: float = field(default_factory=now)
    due_s: float = 0.0


class RemoteVerifier:
    """Asks a server; see `Verifier`. One row.

    Args:
        ahead: this device's drafter, told of what is verified.
        opening: the `Open` of a request, without its text.
        place: takes in activations.
        meanwhile: drafts a little while an answer is under way; whether there is more to do.
        keep: whether provisional tokens stay; else they are drafts like any others.
        most: drafted tokens of one message.
        vocab_size, max_positions: the target's.
    """

    def __init__(
        self,
        ahead: AheadDrafter,
        *,
        opening: Callable[[VerifyRequest], pb.Open],
        place: Callable[[pb.Activations], None],
        meanwhile: Callable[[PendingRequest], bool],
        provisional: Callable[[], list[int]],
        keep: bool,
        most: int,
        vocab_size: int,
        max_positions: int,
    ) -> None:
        self.link: ServerLink  # set by whoever makes both
        self._ahead, self._opening, self._place = ahead, opening, place
        self._meanwhile, self._provisional = meanwhile, provisional
        self._keep, self._most = keep, most
        self._vocab_size, self._max_positions = vocab_size, max_positions
        self.text: list[int] = []
        self.turn = 0
        self._committed: list[int] | None = None  # what the server holds, as far as we know
        self._pending: PendingRequest | None = None
        self._wake = asyncio.Event()
        self._placed_s = 0.0
        self._asked_s = 0.0

    @property
    def stats(self) -> LinkStats:
        """Of the link."""
        return self.link.stats

    async def verify(self, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
        """See `Verifier`.

        Raises:
            RefusedError: the server refuses the session, or answers what no server may.
        """
        (request,) = requests
        self.text = [*self.text[: request.num_verified], *request.new_tokens]
        opening = self.text != self._committed
        self.turn += opening
        self._ahead.sampling = request.sampling
        self._ahead.follow(self.text)
        loop = asyncio.get_running_loop()
        self._pending = PendingRequest(request, opening, loop.create_future(), request.tree)
        try:
            self._send()
            return [await self._answer(self._pending)]
        finally:
            self._pending = None

    def close(self, row: int) -> None:
        """Nothing to do: the session itself tells the server that it is closed."""

    async def _answer(self, pending: PendingRequest) -> VerifyResult:
        """Wait, drafting meanwhile, and repeat the request as often as it takes."""
        await asyncio.sleep(0)
        while not pending.answer.done():
            if self.link.refused is not None:
                raise self.link.refused
            if now() >= pending.due_s and self.link.state == "up":
                self._send()
            self._fetch()
            more = self._meanwhile(pending)
            # Answers that have come are read before anything more is drafted.
            left_s = pending.due_s - now() if self.link.state == "up" else POLL_S
            await self._wait(pending, 0.0 if more else max(0.01, left_s))
        return pending.answer.result()

    async def _wait(self, pending: PendingRequest, timeout_s: float) -> None:
        if not timeout_s:
            await asyncio.sleep(0)
            return
        woken = asyncio.ensure_future(self._wake.wait())
        # In pieces, because the link may turn up, or silent, without waking anybody.
        await asyncio.wait(
            (pending.answer, woken),
            timeout=min(timeout_s, POLL_S),
            return_when=asyncio.FIRST_COMPLETED,
        )
        woken.cancel()
        self._wake.clear()

    def wake(self) -> None:
        """Something changed that a waiting request should look at."""
        self._wake.set()

    def _retry_s(self) -> float:
        stats = self.stats
        pass_s = stats.rounds[-1].pass_s if stats.rounds else 0.0
        return max(self.link.retry_s, 4 * (stats.rtt_s or 0.0) + 4 * pass_s)

    def connected(self) -> None:
        """A new connection: say who is there, and ask again what was not answered."""
        opens = self._pending is not None and self._pending.opening
        if self._committed is not None and not opens:
            held = wire.range_messages(self._ahead.held.runs())
            resume = pb.Resume(base=len(self._committed), held=held)
            self.link.send(pb.ClientMessage(turn=self.turn, resume=resume))
        if self._pending is not None:
            self._pending.resent = True
            self._keep_provisional(self._pending)
        self._send()
        self.wake()

    def _keep_provisional(self, pending: PendingRequest) -> None:
        """With `keep`, what was shown without verification is the text from now on."""
        if self._keep and self._provisional():
            pending.kept, pending.opening = list(self._provisional()), True
            self.turn += 1

    def settle(self) -> None:
        """End a turn with what was drafted without the server, which need not be asked."""
        pending, tokens = self._pending, self._provisional()
        if pending is not None and not pending.answer.done():
            self._committed = None  # the server knows nothing of these
            pending.kept = tokens[:-1]
            self._resolve(pending, tokens[-1:], [])

    def _send(self) -> None:
        """Send the request that waits, as it should be asked now."""
        pending = self._pending
        if pending is None or pending.answer.done():
            return
        pending.due_s = now() + self._retry_s()
        message = pb.ClientMessage(turn=self.turn)
        if pending.opening:
            message.open.CopyFrom(self._opening(pending.request))
            message.open.token_ids.extend([*self.text, *pending.kept])
            message.open.held.extend(wire.range_messages(self._ahead.held.runs()))
        else:
            pending.tree = self._drafts(pending)
            message.draft.CopyFrom(wire.draft_message(len(self.text), pending.tree))
        self.link.send(message)

    def _drafts(self, pending: PendingRequest) -> DraftTree:
        """The request's drafts; after a cut, what the device has drafted since, if that is more."""
        ready = self._ahead.ready()[: self._most]
        further = len(ready) > max(pending.request.tree.depths, default=0)
        return wire.chain(ready) if pending.resent and further else pending.request.tree

    def _fetch(self) -> None:
        """Ask for activations that must have been lost."""
        gaps = self._gaps()
        waited = min(now() - self._placed_s, now() - self._asked_s)
        if gaps and waited > FETCH_AFTER * self.link.retry_s and self.link.state == "up":
            self._asked_s = now()
            ranges = pb.Fetch(ranges=wire.range_messages(gaps))
            self.link.send(pb.ClientMessage(turn=self.turn, fetch=ranges))

    def _gaps(self) -> list[tuple[int, int]]:
        if self._committed is None or not self._ahead.needs_memory:
            return []
        return list(self._ahead.held.gaps(len(self._committed) - 1))

    def receive(self, message: pb.ServerMessage) -> None:
        """A message of the server; those of earlier turns mean nothing any more.

        A problem of no turn is one of the connection or of the whole session.

        Raises:
            WireError: what no server may say.
        """
        of_no_turn = message.HasField("problem") and not message.turn
        if message.turn != self.turn and not of_no_turn:
            return
        if message.HasField("verdict"):
            self._verdict(message.verdict)
        elif message.HasField("activations"):
            self._activations(message.activations)
        elif message.HasField("problem"):
            self._problem(message.problem)

    def _verdict(self, verdict: pb.Verdict) -> None:
        pending = self._pending
        if pending is not None and not pending.answer.done():
            text = [*self.text, *pending.kept]
            skip = len(text) - verdict.base
            if skip < 0:
                raise WireError(
                    f"The server speaks of {verdict.base} tokens; here are {len(text)}."
                )
            if skip < len(verdict.tokens):
                if list(verdict.tokens[:skip]) != text[verdict.base :]:
                    self._reopen(pending)
                    return
                self._check(pending, verdict)
                self._committed = [*text, *verdict.tokens[skip:]]
                self._resolve(pending, verdict.tokens[skip:], verdict.logprobs[skip:])
                self._note(pending, verdict)
        if verdict.HasField("activations"):
            self._activations(verdict.activations)

    def _check(self, pending: PendingRequest, verdict: pb.Verdict) -> None:
        if verdict.base + len(verdict.tokens) > self._max_positions:
            raise WireError(f"The server sent a text beyond {self._max_positions} tokens.")
        if any(token >= self._vocab_size for token in verdict.tokens):
            raise WireError(f"The server sent a token outside 0..{self._vocab_size - 1}.")
        asked = len(verdict.tokens) if pending.request.sampling.logprobs else 0
        if len(verdict.logprobs) != asked:
            raise WireError(
                f"The server sent {len(verdict.logprobs)} log-probabilities where {asked} were due."
            )

    def _resolve(
        self, pending: PendingRequest, tokens: Sequence[int], logprobs: Sequence[float]
    ) -> None:
        """Hand the engine its verdict, in terms of a tree that has these tokens."""
        *path, last = [*pending.kept, *tokens]
        tree, nodes = _tree_with(path, (pending.request.tree, pending.tree))
        told = (*[math.nan] * len(pending.kept), *logprobs) if logprobs else ()
        pending.answer.set_result(VerifyResult(tuple(nodes), last, logprobs=told, tree=tree))
        self.text = [*self.text, *path, last]
        hit = self._ahead.follow(self.text)
        if not pending.opening:
            self.stats.ahead_hits += hit and bool(self._ahead.ready())
            self.stats.ahead_misses += not (hit and bool(self._ahead.ready()))

    def _note(self, pending: PendingRequest, verdict: pb.Verdict) -> None:
        drafted = 0 if pending.opening else len(pending.tree.tokens)
        accepted = len(pending.answer.result().accepted) - len(pending.kept)
        ready = len(self._ahead.ready())
        self.stats.rounds.append(
            RoundTrip(pending.first_s, now(), _seconds(verdict.pass_s), drafted, accepted, ready)
        )

    def _activations(self, activations: pb.Activations) -> None:
        """Take activations in, if they are of text that is known to be verified."""
        self.stats.activation_bytes += len(activations.data)
        if activations.start + activations.count <= len(self.text):
            self._place(activations)
            self._placed_s = now()
            self.wake()

    def _reopen(self, pending: PendingRequest) -> None:
        """The server's text is not ours: tell it what the text is."""
        self.stats.reopened += 1
        pending.opening = True
        self.turn += 1
        pending.due_s = now() + _pause_s(pending)
        if pending.put_off == 1:
            self._send()

    def _problem(self, problem: pb.Problem) -> None:
        pending = self._pending
        if problem.kind == pb.Problem.REFUSED:
            self.link.refuse(RefusedError(f"The server refuses: {wire.one_line(problem.message)}"))
        elif problem.kind == pb.Problem.DRAINING:
            self.link.renew()
        elif problem.kind == pb.Problem.BUSY and pending is not None:
            pending.due_s = now() + max(_seconds(problem.retry_s), _pause_s(pending))
        elif problem.kind == pb.Problem.LOST:
            self._committed = None
            if pending is not None and not pending.answer.done():
                self._reopen(pending)
        self.wake()


def _pause_s(pending: PendingRequest) -> float:
    """How long a request waits that the server did not verify: the longer, the oftener."""
    pending.put_off += 1
    return min(FIRST_PAUSE_S * 2.0 ** min(pending.put_off - 2, 16), MAX_PAUSE_S)


def _seconds(told: float) -> float:
    """What a server says of time, within reason; it may say infinity, or that it is no number."""
    return told if 0.0 <= told <= MAX_SERVER_S else MAX_SERVER_S


def _tree_with(path: list[int], trees: Sequence[DraftTree]) -> tuple[DraftTree, list[int]]:
    """The first of these trees that has a path from its root, and its nodes; else one made of it.

    The text may have come further than any request that the device still knows of.
    """
    for tree in trees:
        edges, nodes = children(tree), [-1]
        for token in path:
            nodes.append(edges.get((nodes[-1], token), -2))
        if -2 not in nodes:
            return tree, nodes[1:]
    return wire.chain(path), list(range(len(path)))
