"""One session as the server holds it: its text, its row, and what to answer.

The text is all that answers depend on. `token_ids` is what is committed: every token that the
target chose, and the prompt. Of them the last has no keys and values yet.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from moaspec.drafting.draft_tree import DraftTree
from moaspec.drafting.protocols import VerifyRequest, VerifyResult
from moaspec.engine.position_rules import PositionRules
from moaspec.remote.protocol import target_pb2 as pb
from moaspec.remote.protocol.activation_records import RecordRequest, Records
from moaspec.remote.server.shared_verifier import SharedVerifier
from moaspec.sampling.params import GREEDY, SamplingParams
from moaspec.sampling.token_ids import common_length


@dataclass(frozen=True, kw_only=True)
class Opening:
    """A turn as a device asks for it, checked; its grammar is still to be compiled."""

    turn: int
    token_ids: tuple[int, ...]
    prompt_length: int
    sampling: SamplingParams
    grammar: str
    asked: RecordRequest | None


@dataclass(frozen=True)
class Drafted:
    """Drafts as a device sends them, checked."""

    turn: int
    base: int
    tree: DraftTree


@dataclass(eq=False)
class ServerSession:
    """A row of the shared target, lent to one device.

    Attributes:
        name: the device's name for it.
        owner: whose credentials opened it.
        row: its row.
        token_ids: committed tokens, prompt included.
        base: of these, tokens whose keys and values the target's cache holds.
        decided: whether the target has chosen a token after the turn's opening text.
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
    records: Records | None = None
    pass_s: float = 0.0
    used_s: float = field(default_factory=time.monotonic)
    _opened: int = 0

    @property
    def decided(self) -> bool:
        """Whether the turn's first token is chosen."""
        return len(self.token_ids) > self._opened

    def knows(self, opening: Opening) -> bool:
        """Whether this turn began before, so that its request came twice."""
        ids = opening.token_ids
        return opening.turn == self.turn and tuple(self.token_ids[: len(ids)]) == ids

    def begin(self, opening: Opening, sampling: SamplingParams) -> None:
        """Take over a turn's text: what it shares with the old one stays where it is.

        Args:
            opening: the turn.
            sampling: its settings, with the grammar as a logits processor.
        """
        ids = list(opening.token_ids)
        same_keys = self.rules.shares_keys(
            self.num_verified, len(ids), self.prompt_length, opening.prompt_length
        )
        common = common_length(self.token_ids, ids[:-1])
        self.num_verified = min(common, self.num_verified) if same_keys else 0
        self.turn, self.token_ids, self._opened = opening.turn, ids, len(ids)
        self.prompt_length, self.sampling = opening.prompt_length, sampling
        self.logprobs = []
        self._adopt(opening.asked)

    def _adopt(self, asked: RecordRequest | None) -> None:
        """Hold activations as the device wants them now."""
        old = self.records
        if asked is None:
            self.records = None
        elif old is None or old.layout != asked.layout:
            self.records = Records(asked.layout)
            self.num_verified = 0  # they come from reading the text
        if self.records is not None and asked is not None:
            self.records.cut(self.num_verified)
            self.hold(asked)

    def hold(self, asked: RecordRequest) -> None:
        """The device says what it has."""
        if self.records is not None:
            self.records.sent.cut(0)
            for start, stop in asked.held:
                self.records.sent.add(start, stop)

    async def read(self) -> AsyncIterator[None]:
        """Read the text, stretch by stretch, and choose the token after it; yields after each."""
        if self.records is not None:
            self.records.reading = True
        size, total = self.shared.options.prefill_tokens, len(self.token_ids)
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
        """Verify drafts below the newest token; activations of what was verified, if few."""
        start = self.num_verified
        if not self.rules.keeps_keys(start, len(self.token_ids)):
            # All keys have changed with the text's length: it is read anew, without drafts.
            self.num_verified = 0
            if self.records is not None:
                self.records.cut(0)
            async for _ in self.read():
                pass
            return None
        await self._decide(self.token_ids[start:], self._allowed(tree))
        return None if self.records is None else self.records.newest(start)

    def _allowed(self, tree: DraftTree) -> DraftTree:
        """No drafts past the longest text or past the next change of all keys."""
        length = len(self.token_ids)
        room = self.rules.end_of_drafts(length) - length
        return tree if max(tree.depths, default=0) <= room else DraftTree()

    async def _decide(
        self, known: Sequence[int], tree: DraftTree | None = None, *, total: int = 0
    ) -> None:
        """One pass; with `total` the text goes on, and what follows `known` is not asked."""
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
        accepted = [request.tree.tokens[node] for node in verdict.accepted]
        self.num_verified += len(known) + len(accepted)
        if self.records is not None:
            self._record(self.records, verdict)
        if not total:
            self.token_ids += [*accepted, verdict.next_token]
            self.logprobs += verdict.logprobs
        self.used_s = time.monotonic()

    def _record(self, records: Records, verdict: VerifyResult) -> None:
        count = verdict.features[0].shape[2]
        records.write(self.num_verified - count, verdict.features)

    def answer(self, base: int, activations: pb.Activations | None = None) -> pb.Verdict:
        """Everything committed past `base`."""
        past = len(self.token_ids) - base
        return pb.Verdict(
            base=base,
            tokens=self.token_ids[base:],
            logprobs=self.logprobs[-past:] if past and self.logprobs else (),
            activations=activations,
            pass_s=self.pass_s,
        )
