"""A `Verifier` whose target is on a server.

A request is repeated until it is answered, also after cuts of the link. Answers depend on the text
alone, so repetitions change nothing.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.drafting.protocols import Verifier, VerifyRequest, VerifyResult
from moaspec_core.drafting.tree_shapes import nodes_along, tree_with, without
from moaspec_core.engine.position_rules import TargetInfo
from moaspec_core.errors import RefusedError, WireError
from moaspec_core.support.limits import MAX_DRAFTED, MAX_STREAMED
from moaspec_edge.device.draft_ahead import AheadDrafter
from moaspec_edge.device.events import RoundTrip, now
from moaspec_edge.device.link import ServerLink
from moaspec_edge.device.prefix_cache import DeviceActivations
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol import wire
from moaspec_edge.protocol.fleet import AVOID_S, BUSY_S

POLL_S = 0.25
"""A waiting request checks its link at least this often."""

MAX_SERVER_S = 30.0
"""Limit of times that a server states: of a pass, and until the next attempt."""

FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 2.0
"""First and longest pause before a request that the server did not verify is repeated."""

FETCH_AFTER = 2
"""Missing activations are requested after this multiple of `retry_s` without any."""


@dataclass(eq=False)
class PendingRequest:
    """A request that waits for its verdict.

    Attributes:
        request: of the engine.
        opening: whether it opens a turn.
        tree: the drafts that were sent last.
        kept: provisional tokens that became part of the text without verification.
        resent: whether the link was lost since the request was made.
        overtaken: whether the verdict of a later request came first.
        put_off: number of times that the server did not verify it.
        first_s: time of the first message.
        due_s: time of the next repetition.
        result: for the engine; None until the verdict.
    """

    request: VerifyRequest
    opening: bool
    tree: DraftTree
    kept: list[int] = field(default_factory=list)
    resent: bool = False
    overtaken: bool = False
    put_off: int = 0
    first_s: float = field(default_factory=now)
    due_s: float = 0.0
    result: VerifyResult | None = None

    @property
    def repeated(self) -> bool:
        """Whether it was sent again, after a cut or because the server did not verify it."""
        return self.resent or self.put_off > 0


class RemoteVerifier(Verifier):
    """A `Verifier` of one text that asks a server.

    Args:
        ahead: this device's drafter, which follows the verified text.
        target: the target that the device drafts for.
        opening: the fields that all `Open` messages of the session share.
        memory: stores activations; None where the drafter needs none.
        meanwhile: drafts one step while a verdict is awaited; returns whether to call it again.
        num_streamed: number of rounds without drafts that will follow one without drafts.
        observe: called with each draft of a streamed token: whether it was right.
        keep: whether provisional tokens stay; otherwise they are drafts.
        retry_s: as in `RemoteOptions`.

    Attributes:
        provisional: tokens that were shown without verification.
        max_streamed: most tokens that the server streams after a request, in this turn.
        never_drafts: whether this turn sends no drafts, even after a cut.
        counts: whether the latest request sent drafts and was sent once.
    """

    def __init__(
        self,
        ahead: AheadDrafter,
        *,
        target: TargetInfo,
        opening: pb.Open,
        memory: DeviceActivations | None,
        meanwhile: Callable[[PendingRequest], bool],
        num_streamed: Callable[[], int],
        observe: Callable[[bool], None],
        keep: bool,
        retry_s: float,
    ) -> None:
        self.link: ServerLink  # the session sets it
        self._ahead, self._target, self._opening = ahead, target, opening
        self._memory, self._meanwhile, self._keep = memory, meanwhile, keep
        self._num_streamed, self._observe, self._retry_s = num_streamed, observe, retry_s
        self.text: list[int] = []
        self.provisional: list[int] = []
        self.turn = 0
        self._committed: list[int] | None = None  # the server's text, if known
        self._pending: PendingRequest | None = None  # until it is answered
        self._wake = asyncio.Event()
        self.max_streamed = 0
        self.never_drafts = self.counts = False
        self._streamed = 0  # length up to which the server streams tokens in this turn
        self._early: dict[int, pb.Verdict] = {}  # not asked for yet, by base
        self._activations_s = 0.0  # time of the latest activations, or request for missing ones

    async def verify(self, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
        """Verify a request on the server.

        Raises:
            RefusedError: the server refuses the session, or its answer is invalid.
        """
        (request,) = requests
        self.text = [*self.text[: request.num_verified], *request.new_tokens]
        # A turn may continue the very text that the server has, with other settings.
        begins = len(self.text) == request.prompt_length
        opening = begins or self.text != self._committed
        self.turn += opening
        self._ahead.sampling = request.sampling
        self._ahead.follow(self.text)
        self._pending = pending = PendingRequest(request, opening, request.tree)
        try:
            self._send()
            early = self._early.pop(len(self.text), None)
            if early is not None:
                self._verdict(early)
            return [await self._answer(pending)]
        finally:
            self._pending = None

    async def _answer(self, pending: PendingRequest) -> VerifyResult:
        """Wait for the verdict; draft meanwhile, and repeat the request when it is due."""
        await asyncio.sleep(0)
        while pending.result is None:
            if self.link.refused is not None:
                raise self.link.refused
            if now() >= pending.due_s and self.link.stats.state == "up":
                self._send()
            self._fetch()
            more = self._meanwhile(pending)
            if more:
                await asyncio.sleep(0)  # received answers are handled before the next draft
            else:
                left_s = pending.due_s - now() if self.link.stats.state == "up" else POLL_S
                await self._wait(max(0.01, left_s))
        return pending.result

    async def _wait(self, timeout_s: float) -> None:
        """Wait for a wake-up; in short waits, because the link may change its state without one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(timeout_s, POLL_S)):
                await self._wake.wait()
        self._wake.clear()

    def wake(self) -> None:
        self._wake.set()

    def _due_in_s(self) -> float:
        stats = self.link.stats
        pass_s = stats.rounds[-1].pass_s if stats.rounds else 0.0
        return max(self._retry_s, 4 * (stats.rtt_s or 0.0) + 4 * pass_s)

    def connected(self) -> None:
        """Resume the session on a new connection, and repeat the waiting request."""
        pending = self._pending
        if self._committed is not None and not (pending is not None and pending.opening):
            received = wire.range_messages(self._ahead.received.runs())
            resume = pb.Resume(base=len(self._committed), held=received)
            self.link.send(pb.ClientMessage(turn=self.turn, resume=resume))
        if pending is not None:
            pending.resent = True
            self._keep_provisional(pending)
        self._send()
        self.wake()

    def _keep_provisional(self, pending: PendingRequest) -> None:
        """With `keep`, add the provisional tokens to the text."""
        if self._keep and self.provisional:
            pending.kept, pending.opening = list(self.provisional), True
            self.turn += 1

    def settle(self) -> None:
        """End a turn with its provisional tokens, without asking the server."""
        pending, tokens = self._pending, self.provisional
        if pending is not None:
            self._committed = None  # the server does not have these tokens
            pending.resent = True
            pending.kept = tokens[:-1]
            self._resolve(pending, tokens[-1:], [], ())

    def _send(self) -> None:
        """Send the waiting request in its current form."""
        pending = self._pending
        if pending is None:
            return
        pending.due_s = now() + self._due_in_s()
        message = pb.ClientMessage(turn=self.turn)
        if pending.opening:
            self._streamed = 0
            self._early.clear()
            message.open.CopyFrom(self._opening)
            message.open.sampling.CopyFrom(wire.sampling_message(pending.request.sampling))
            message.open.prompt_length = pending.request.prompt_length
            message.open.token_ids.extend([*self.text, *pending.kept])
            message.open.held.extend(wire.range_messages(self._ahead.received.runs()))
        else:
            pending.tree = self._drafts(pending)
            most = min(self.max_streamed, MAX_STREAMED, self._ahead.room)
            num_streamed = 0 if pending.tree.tokens else max(0, min(self._num_streamed(), most))
            message.draft.CopyFrom(wire.draft_message(len(self.text), pending.tree, num_streamed))
            if num_streamed:
                self._streamed = max(self._streamed, len(self.text) + 1 + num_streamed)
        self.link.send(message)

    def halt(self) -> None:
        """Have the server stream no more tokens, because the turn has ended."""
        if self._streamed > len(self.text):
            # A request that has been answered is answered again without a pass.
            draft = wire.draft_message(len(self.text) - 1, DraftTree())
            self.link.send(pb.ClientMessage(turn=self.turn, draft=draft))

    def _drafts(self, pending: PendingRequest) -> DraftTree:
        """The request's drafts; after a cut, the drafts made since, if they are longer."""
        ready = self._ahead.ready()[:MAX_DRAFTED]
        longer = len(ready) > max(pending.request.tree.depths, default=0)
        replaced = pending.resent and longer and not self.never_drafts
        return wire.chain(ready) if replaced else pending.request.tree

    def _fetch(self) -> None:
        """Request activations that must have been lost."""
        waited = now() - self._activations_s > FETCH_AFTER * self._retry_s
        late = waited and self.link.stats.state == "up"
        if not late or self._committed is None or self._memory is None:
            return
        if gaps := list(self._ahead.received.gaps(len(self._committed) - 1)):
            self._activations_s = now()
            ranges = pb.Fetch(ranges=wire.range_messages(gaps))
            self.link.send(pb.ClientMessage(turn=self.turn, fetch=ranges))

    def receive(self, message: pb.ServerMessage) -> None:
        """Handle a message of the server; messages of earlier turns are ignored.

        A problem without a turn concerns the connection or the whole session.

        Raises:
            WireError: an invalid message.
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
        if len(self.text) + (pending is not None) <= verdict.base < self._streamed:
            self._early[verdict.base] = verdict
            if pending is not None and not pending.overtaken:
                pending.overtaken, pending.due_s = True, 0.0  # its own verdict is lost
                self.wake()
            return
        if pending is not None:
            text = [*self.text, *pending.kept]
            skip = len(text) - verdict.base
            if skip < 0:
                raise WireError(
                    f"The server has {verdict.base} tokens of the text; the device has {len(text)}."
                )
            if skip < len(verdict.tokens):
                if list(verdict.tokens[:skip]) != text[verdict.base :]:
                    self._reopen(pending)
                    return
                self._check(pending, verdict)
                self.max_streamed = verdict.max_further
                self._keep_later_tokens(pending, verdict, skip)
                self._committed = [*text, *verdict.tokens[skip:]]
                # Of a request that was sent again, the server may have verified either tree.
                dropped = set[int]() if skip or pending.resent else set(verdict.dropped)
                self._resolve(pending, verdict.tokens[skip:], verdict.logprobs[skip:], dropped)
                self._record_round_trip(pending, verdict)
        if verdict.HasField("activations"):
            self._activations(verdict.activations)

    def _keep_later_tokens(self, pending: PendingRequest, verdict: pb.Verdict, skip: int) -> None:
        """Cut a verdict after the tokens that this round can emit; keep the rest for later ones."""
        trees, path = (pending.request.tree, pending.tree), verdict.tokens[skip:-1]
        stop = skip + 1 + max(len(nodes_along(path, tree)) for tree in trees)
        if pending.kept or stop == len(verdict.tokens):
            return
        later = pb.Verdict()
        later.CopyFrom(verdict)
        later.base += stop
        del later.tokens[:stop], later.logprobs[:stop], later.dropped[:]
        self._early[later.base] = later
        del verdict.tokens[stop:], verdict.logprobs[stop:]
        verdict.ClearField("activations")

    def _check(self, pending: PendingRequest, verdict: pb.Verdict) -> None:
        most, vocab_size = self._target.max_positions, self._target.vocab_size
        # Drafts may fill the context, and the target still chooses the token after them.
        if verdict.base + len(verdict.tokens) > most + 1:
            raise WireError(f"The server sent a text beyond {most} tokens.")
        if any(token >= vocab_size for token in verdict.tokens):
            raise WireError(f"The server sent a token outside 0..{vocab_size - 1}.")
        asked = len(verdict.tokens) if pending.request.sampling.logprobs else 0
        if len(verdict.logprobs) != asked:
            raise WireError(
                f"The server sent {len(verdict.logprobs)} log-probabilities where {asked} were due."
            )

    def _resolve(
        self,
        pending: PendingRequest,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        dropped: Collection[int],
    ) -> None:
        """Resolve a request with a tree that contains these tokens.

        Drafts that the server dropped are not in it: they are neither right nor wrong.
        """
        *path, last = [*pending.kept, *tokens]
        sent = [without(tree, dropped) for tree in (pending.request.tree, pending.tree)]
        tree, nodes = tree_with(path, sent)
        told = (*[math.nan] * len(pending.kept), *logprobs) if logprobs else ()
        pending.result = VerifyResult(tuple(nodes), last, logprobs=told, tree=tree)
        self.wake()
        self.text = [*self.text, *path, last]
        expected = self._ahead.ready()
        hit = self._ahead.follow(self.text)
        drafted = tree.tokens or pending.tree.tokens
        self.counts = bool(pending.tree.tokens) and not (pending.opening or pending.repeated)
        if expected and not path and not drafted and not pending.opening:
            self._observe(expected[0] == last)
        if not pending.opening and drafted:
            ready = hit and bool(self._ahead.ready())
            self.link.stats.ahead_hits += ready
            self.link.stats.ahead_misses += not ready
        self._pending = None

    def _record_round_trip(self, pending: PendingRequest, verdict: pb.Verdict) -> None:
        found = pending.result
        assert found is not None, "the verdict has resolved it"
        drafted = 0 if pending.opening or found.tree is None else len(found.tree.tokens)
        dropped = 0 if pending.opening else max(0, len(pending.tree.tokens) - drafted)
        accepted = len(found.accepted) - len(pending.kept)
        ready, pass_s = len(self._ahead.ready()), _seconds(verdict.pass_s)
        times = (pending.first_s, now(), pass_s)
        self.link.stats.add_round(
            RoundTrip(*times, drafted, accepted, ready, dropped, pending.repeated)
        )

    def _activations(self, activations: pb.Activations) -> None:
        """Store activations, if their tokens are known to be verified."""
        self.link.stats.activation_bytes += len(activations.data)
        if activations.start + activations.count <= len(self.text):
            if self._memory is not None and activations.count:
                self._memory.place(activations.start, activations.data, activations.count)
            self._activations_s = now()
            self.wake()

    def _reopen(self, pending: PendingRequest) -> None:
        """Open the turn again, because the server's text differs."""
        self.link.stats.reopened += 1
        pending.opening = True
        self.turn += 1
        pending.due_s = now() + _pause_s(pending)
        if pending.put_off == 1:
            self._send()

    def _problem(self, problem: pb.Problem) -> None:
        pending = self._pending
        if problem.kind == pb.Problem.REFUSED:
            self.link.refuse(RefusedError(wire.refusal(problem.message)))
        elif problem.kind == pb.Problem.DRAINING:
            self.link.leave(AVOID_S, anyway=True)
        elif problem.kind == pb.Problem.BUSY and pending is not None:
            pending.due_s = now() + max(_seconds(problem.retry_s), _pause_s(pending))
            self.link.leave(BUSY_S, anyway=False)
        elif problem.kind == pb.Problem.LOST:
            self._committed = None
            if pending is not None:
                self._reopen(pending)
        self.wake()


def _pause_s(pending: PendingRequest) -> float:
    """Pause before a request that the server did not verify is repeated; it doubles each time."""
    pending.put_off += 1
    return min(FIRST_PAUSE_S * 2.0 ** min(pending.put_off - 2, 16), MAX_PAUSE_S)


def _seconds(told: float) -> float:
    """Clamp a time that a server states, which may be infinite or not a number."""
    return told if 0.0 <= told <= MAX_SERVER_S else MAX_SERVER_S
