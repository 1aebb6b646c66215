"""One session on the server: its text, its row of the cache, and its answers.

Answers depend on the text alone. `token_ids` holds the committed text: the prompt and every token
that the target chose. The last token has no keys and values yet.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.drafting.protocols import VerifyRequest, VerifyResult
from moaspec_core.drafting.tree_shapes import dropped_nodes
from moaspec_core.engine.position_rules import PositionRules
from moaspec_core.errors import LinkError
from moaspec_core.sampling.params import GREEDY, SamplingParams
from moaspec_core.sampling.token_ids import common_length
from moaspec_core.support.limits import MAX_STREAMED
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol.position_ranges import PositionRange, PositionSet
from moaspec_edge.server.activation_records import ActivationRecords, RecordRequest
from moaspec_edge.server.response_stream import ResponseStream
from moaspec_edge.server.shared_verifier import SharedVerifier

OnText = Callable[[Sequence[int], Sequence[int]], None]
"""Gets prompt and generated ids of a text; must neither block nor raise."""


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """A checked request for a turn, whose grammar is not compiled yet."""

    turn: int
    token_ids: tuple[int, ...]
    prompt_length: int
    sampling: SamplingParams
    grammar: str
    asked: RecordRequest | None


@dataclass(frozen=True)
class DraftRequest:
    """A checked request to verify drafts, or to stream `num_streamed` tokens after the next one."""

    turn: int
    base: int
    tree: DraftTree
    num_streamed: int = 0


@dataclass(eq=False)
class ServerSession:
    """A row of the shared target, leased to one device.

    Attributes:
        name: chosen by the device.
        owner: owner of the credentials that opened it.
        token_ids: committed tokens, with the prompt.
        num_verified: number of these tokens whose keys and values are in the target's cache.
        dropped: nodes of the newest drafts that were not verified.
        stream: of the device's connection; None while it has none.
        task: runs the session's requests; None while there is none.
        waiting: the request that comes next.
        left: a turn that is not read to its end, because the device left.
        goal: length up to which tokens are streamed that no request asks for.
        asked: largest length of the text in the turn's requests.
    """

    name: bytes
    owner: str
    row: int
    shared: SharedVerifier
    rules: PositionRules
    turn: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_verified: int = 0
    prompt_length: int = 0
    sampling: SamplingParams = GREEDY
    records: ActivationRecords | None = None
    pass_s: float = 0.0
    dropped: list[int] = field(default_factory=list)
    used_s: float = field(default_factory=time.monotonic)
    stream: ResponseStream | None = None
    task: asyncio.Task[None] | None = None
    waiting: TurnRequest | DraftRequest | None = None
    left: TurnRequest | None = None
    on_text: OnText | None = None  # gets the turn's text when it is over
    goal: int = 0
    asked: int = 0
    _opened: int = 0
    _drafted_at: int = 0  # length of the text that the newest drafts followed

    @property
    def decided(self) -> bool:
        """Whether the target has chosen the turn's first token."""
        return len(self.token_ids) > self._opened

    @property
    def max_streamed(self) -> int:
        """Most tokens that are streamed after a request.

        Rules may allow no token after the text's end, which only the device knows.
        """
        return 0 if self.sampling.processors or self.sampling.rules else MAX_STREAMED

    def knows(self, opening: TurnRequest) -> bool:
        """Whether this turn has begun already, so that its request is a repetition."""
        ids = opening.token_ids
        return opening.turn == self.turn and tuple(self.token_ids[: len(ids)]) == ids

    def begin(self, opening: TurnRequest, sampling: SamplingParams) -> None:
        """Begin a turn; the common prefix with the old text is not encoded again.

        Args:
            sampling: its parameters, with the grammar as a logits processor.
        """
        self.offer_text()
        ids = list(opening.token_ids)
        same_keys = self.rules.shares_keys(
            self.num_verified, len(ids), self.prompt_length, opening.prompt_length
        )
        common = common_length(self.token_ids, ids[:-1])
        self.num_verified = min(common, self.num_verified) if same_keys else 0
        self.turn, self.token_ids, self._opened = opening.turn, ids, len(ids)
        self.prompt_length, self.sampling = opening.prompt_length, sampling
        self.logprobs, self.dropped, self.goal, self.asked = [], [], 0, 0
        self._adopt(opening.asked)

    def offer_text(self) -> None:
        """Pass on the target's text, unless the device influenced it.

        If a turn was opened after the end of its prompt, the device sent a part of the response.
        """
        whole = self._opened == self.prompt_length
        if self.on_text is not None and self.decided and whole and not self.sampling.changes_logits:
            self.on_text(self.token_ids[: self._opened], self.token_ids[self._opened :])

    def _adopt(self, asked: RecordRequest | None) -> None:
        """Keep activations in the layout that the device asks for."""
        old = self.records
        if asked is None:
            self.records = None
        elif old is None or old.layout != asked.layout:
            self.records = ActivationRecords(asked.layout)
            self.num_verified = 0  # activations are made while the text is encoded
        if self.records is not None and asked is not None:
            self.records.cut(self.num_verified)
            self.hold(asked.received)

    def hold(self, runs: Iterable[PositionRange]) -> None:
        """Mark the activations that the device has."""
        if self.records is not None:
            self.records.sent = PositionSet(runs)

    async def read(self) -> AsyncIterator[None]:
        """Encode the text in pieces and choose the next token; yields after each piece."""
        if self.records is not None:
            self.records.reading = True
        size, total = self.shared.prompt_piece, len(self.token_ids)
        while total - self.num_verified > size:
            await self._decide(
                self.token_ids[self.num_verified : self.num_verified + size], total=total
            )
            yield
        await self._decide(self.token_ids[self.num_verified :])
        if self.records is not None:
            self.records.reading = False
        yield

    async def verify(self, tree: DraftTree) -> pb.Activations | None:
        """Verify drafts after the newest token; returns activations if they are small."""
        start, self._drafted_at = self.num_verified, len(self.token_ids)
        self.dropped = list(range(len(tree.tokens)))
        if not self.rules.keeps_keys(start, len(self.token_ids)):
            # All keys change at this length, so the text is encoded again, without drafts.
            self.num_verified = 0
            if self.records is not None:
                self.records.cut(0)
            async for _ in self.read():
                pass
            return None
        verified = await self._decide(self.token_ids[start:], self._allowed(tree))
        self.dropped = dropped_nodes(tree, verified)
        return None if self.records is None else self.records.newest(start)

    def _allowed(self, tree: DraftTree) -> DraftTree:
        """Drop drafts that exceed the longest text or the next change of all keys."""
        length = len(self.token_ids)
        room = self.rules.end_of_drafts(length) - length
        return tree if max(tree.depths, default=0) <= room else DraftTree()

    async def _decide(
        self, known: Sequence[int], tree: DraftTree | None = None, *, total: int = 0
    ) -> DraftTree:
        """Run one pass; returns the drafts that it verified.

        With `total`, the text's length, it only encodes and chooses no token.
        """
        request = VerifyRequest(
            self.row,
            self.num_verified,
            tuple(known),
            tree or DraftTree(),
            GREEDY if total else self.sampling,
            self.prompt_length,
            encode=self.records is not None,
            text_length=total,
        )
        verdict, self.pass_s = await self.shared.decide(request)
        tree = verdict.tree or request.tree  # without drafts that the server's load forbids
        accepted = [tree.tokens[node] for node in verdict.accepted]
        self.num_verified += len(known) + len(accepted)
        if self.records is not None and verdict.features is not None:
            self._record(self.records, verdict)
        if not total:
            self.token_ids += [*accepted, verdict.next_token]
            self.logprobs += verdict.logprobs
        self.used_s = time.monotonic()
        return tree

    def _record(self, records: ActivationRecords, verdict: VerifyResult) -> None:
        count = verdict.features[0].shape[2]
        records.write(self.num_verified - count, verdict.features)

    def attach(self, stream: ResponseStream) -> None:
        """Send this session's answers on this stream from now on."""
        if self.stream is not None and self.stream is not stream:
            self.stream.session = None
            self.stream.stop(LinkError("The device came back on another connection."))
        stream.session, self.stream = self, stream

    def detach(self) -> None:
        """Forget the stream: its connection or this session has ended."""
        if self.stream is not None:
            self.stream.session = None
        self.stream = None

    def close(self) -> None:
        """Free the row and cancel the work of the session."""
        self.waiting = None
        if self.task is not None:
            self.task.cancel()
        self.detach()
        self.shared.close(self.row)

    def more(self) -> None:
        """Wake the sender: there may be new activations."""
        if self.stream is not None:
            self.stream.more()

    def answer(self, base: int, activations: pb.Activations | None = None) -> None:
        """Send all tokens committed past `base`; without a stream, mark activations as unsent."""
        if self.stream is None:
            if self.records is not None and activations is not None:
                stop = activations.start + activations.count
                self.records.sent.discard(activations.start, stop)
            return
        past = len(self.token_ids) - base
        verdict = pb.Verdict(
            base=base,
            tokens=self.token_ids[base:],
            logprobs=self.logprobs[-past:] if past and self.logprobs else (),
            activations=activations,
            pass_s=self.pass_s,
            max_further=self.max_streamed,
            dropped=self.dropped if base == self._drafted_at else (),
        )
        self.stream.answer(pb.ServerMessage(turn=self.turn, verdict=verdict))

    def problem(self, kind: pb.Problem.Kind, message: str) -> None:
        """Tell the device about a problem of its session."""
        if self.stream is not None:
            # A refusal concerns the whole session, so it names no turn.
            turn = 0 if kind == pb.Problem.REFUSED else self.turn
            self.stream.problem(kind, message, turn=turn)
