"""The engine: every deployment's decoding loop.

Rows join (`add`), advance together by one round (`step`) and leave (`abort`, or by finishing), each
with its own length and acceptance. A round is: draft, verify, take in what was verified.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from moaspec.decode.lookup import NgramIndex
from moaspec.decode.protocols import Drafter, Request, RowText, Verdict, Verifier
from moaspec.decode.result import Event, GenerationResult, Source, StopReason
from moaspec.decode.sampling import GREEDY, SamplingParams
from moaspec.decode.shaping import FixedShape, ShapePolicy
from moaspec.decode.stop import StopStrings, stop_strings
from moaspec.decode.tree import AUTO, DraftTree, Tree, merged
from moaspec.errors import InputError, PromptError

T = TypeVar("T")

COPY_NGRAMS = (4, 3, 2)
"""Lengths of what free branches look for, longest first: a single token says too little."""


@dataclass
class _Row:
    """Host-side state of one request."""

    handle: int
    row: int
    token_ids: list[int]
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    stop: StopStrings | None
    policy: ShapePolicy
    branches: ShapePolicy | None
    sampling: SamplingParams
    prompt_length: int
    index: NgramIndex = field(default_factory=lambda: NgramIndex(COPY_NGRAMS))
    base: int = 0  # verified tokens whose activations the verifier holds
    result: GenerationResult = field(default_factory=GenerationResult)
    started: float = field(default_factory=time.perf_counter)

    @property
    def prefilled(self) -> bool:
        return self.base > 0

    @property
    def remaining(self) -> int:
        return self.max_new_tokens - len(self.result.token_ids)

    def request(self, base: int, known: Sequence[int], tree: DraftTree) -> Request:
        """What the verifier is asked for this row."""
        return Request(
            self.row,
            base,
            tuple(known),
            tree,
            self.sampling,
            self.prompt_length,
            self.policy.wants_features,
        )


class Engine:
    """Decodes many rows with one verifier and at most one drafter.

    Args:
        verifier: holds the target.
        drafter: proposes tokens; None is plain decoding.
        vocab_size, max_positions: the target's, for checking prompts and ending at its context.
        tokenizer: the target's; only stop strings need it.
        rope_switches: lengths beyond which the keys of a whole text change; see
            `Target.rope_switches`. A draft never crosses one, and a row that did is read anew.
    """

    def __init__(
        self,
        verifier: Verifier,
        drafter: Drafter | None = None,
        *,
        vocab_size: int,
        max_positions: int,
        tokenizer: Any = None,
        rope_switches: Sequence[int] = (),
    ) -> None:
        self._verifier, self._drafter = verifier, drafter
        self._vocab_size, self._max_positions = vocab_size, max_positions
        self._tokenizer, self._switches = tokenizer, tuple(rope_switches)
        self._rows: dict[int, _Row] = {}
        self._next_handle = 0

    @property
    def num_active(self) -> int:
        """Rows that are not finished."""
        return len(self._rows)

    def add(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        stop_token_ids: Iterable[int] = (),
        stop: str | Iterable[str] = (),
        shape: Tree | ShapePolicy = AUTO,
        free_branches: Tree | ShapePolicy | None = None,
        sampling: SamplingParams = GREEDY,
    ) -> int:
        """Let a request join; its prompt is processed by the next `step`.

        Args:
            prompt_ids: at least one token id.
            max_new_tokens: at most so many; with 0 the next `step` ends the row.
            stop_token_ids: ids that end the row.
            stop: strings that end the row as soon as its generated text contains one.
            shape: of the drafts, or a policy of this row's own that decides it every round.
            free_branches: the same for candidates out of the row's own text, which are verified
                beside the drafts and reported as copies; None for none.
            sampling: how tokens are chosen; a seed is drawn where one is needed and missing.

        Returns:
            A handle that events carry.

        Raises:
            PromptError: empty, as long as the context or longer, or ids outside the vocabulary.
            InputError: `max_new_tokens` below 0, a biased token outside the vocabulary, or stop
                strings without a tokenizer.
        """
        check_prompt(prompt_ids, self._vocab_size, self._max_positions)
        if max_new_tokens < 0:
            raise InputError(f"max_new_tokens must be at least 0, got {max_new_tokens}.")
        check_bias(sampling, self._vocab_size)
        strings = stop_strings(stop)
        sampling = sampling.resolved()
        used = {row.row for row in self._rows.values()}
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._rows[handle] = _Row(
            handle=handle,
            row=next(i for i in range(len(used) + 1) if i not in used),
            token_ids=list(prompt_ids),
            max_new_tokens=max_new_tokens,
            stop_token_ids=frozenset(stop_token_ids),
            stop=StopStrings(strings, self._tokenizer) if strings else None,
            policy=FixedShape(shape) if isinstance(shape, Tree) else shape,
            branches=FixedShape(free_branches)
            if isinstance(free_branches, Tree)
            else free_branches,
            sampling=sampling,
            prompt_length=len(prompt_ids),
            result=GenerationResult(seed=sampling.seed),
        )
        return handle

    def abort(self, handle: int) -> GenerationResult:
        """Let a request leave at once; what was generated so far is returned."""
        row = self._rows[handle]
        self._finish(row, "aborted")
        return row.result

    def result(self, handle: int) -> GenerationResult:
        """The result so far of an active request."""
        return self._rows[handle].result

    def step(self) -> list[Event]:
        """`astep` for a verifier that answers at once, such as the local one."""
        return run_now(self.astep())

    async def astep(self) -> list[Event]:
        """Process new prompts and advance every other row by one round."""
        events = self._end_at_once()
        fresh = [row for row in self._rows.values() if not row.prefilled]
        running = [row for row in self._rows.values() if row.prefilled]
        if fresh:
            events += await self._prefill(fresh)
        if running:
            events += await self._round(running)
        return events

    def _end_at_once(self) -> list[Event]:
        """Rows that want no token need no pass."""
        done = [row for row in self._rows.values() if row.max_new_tokens == 0]
        for row in done:
            self._finish(row, "max_new_tokens")
        return [Event(row.handle, (), (), "max_new_tokens") for row in done]

    async def _prefill(self, rows: Sequence[_Row]) -> list[Event]:
        started = time.perf_counter()
        requests = [row.request(0, row.token_ids, DraftTree()) for row in rows]
        verdicts = await self._verifier.verify(requests)
        events = [
            self._take(row, request, verdict)
            for row, request, verdict in zip(rows, requests, verdicts, strict=True)
        ]
        elapsed = time.perf_counter() - started
        for row in rows:
            row.result.timing.prefill_s += elapsed
        return events

    async def _round(self, rows: Sequence[_Row]) -> list[Event]:
        """Draft, verify, take in: one target pass for all rows."""
        started = time.perf_counter()
        trees = self._draft(rows)
        drafted = time.perf_counter()
        requests = [self._request(row, tree) for row, tree in zip(rows, trees, strict=True)]
        verdicts = await self._verifier.verify(requests)
        events = [
            self._take(row, request, verdict)
            for row, request, verdict in zip(rows, requests, verdicts, strict=True)
        ]
        verified = time.perf_counter()
        for row in rows:
            row.result.timing.draft_s += drafted - started
            row.result.timing.verify_s += verified - drafted
        return events

    def _request(self, row: _Row, tree: DraftTree) -> Request:
        """The newest token and its drafts; the whole text where all its keys have changed."""
        if not self._outgrown(row):
            return row.request(row.base, row.token_ids[-1:], tree)
        if self._drafter is not None:
            self._drafter.close(row.row)
        return row.request(0, row.token_ids, DraftTree())

    def _outgrown(self, row: _Row) -> bool:
        """Whether the text crossed a switch of its rotary embeddings since it was verified."""
        return any(row.base <= switch < len(row.token_ids) for switch in self._switches)

    def _draft(self, rows: Sequence[_Row]) -> list[DraftTree]:
        """Trees for all rows; rows that want the same shape are drafted together."""
        trees = [DraftTree()] * len(rows)
        by_shape: dict[Tree, list[int]] = {}
        for i, row in enumerate(rows):
            shape = self._shape(row, row.policy, len(rows)) if self._drafter else None
            if shape is not None:
                by_shape.setdefault(shape, []).append(i)
        for shape, indices in by_shape.items():
            assert self._drafter is not None
            texts = [RowText(rows[i].row, rows[i].token_ids, rows[i].sampling) for i in indices]
            drafts = self._drafter.propose(texts, shape)
            for i, tree in zip(indices, drafts, strict=True):
                trees[i] = tree
        return [self._branched(*one, len(rows)) for one in zip(rows, trees, strict=True)]

    def _branched(self, row: _Row, tree: DraftTree, num_rows: int) -> DraftTree:
        """The drafts, and beside them what followed when the text had its last tokens before."""
        if row.branches is None:
            return tree
        row.index.extend(row.token_ids)
        shape = self._shape(row, row.branches, num_rows)
        if shape is None:
            return tree
        paths = row.index.paths(shape)
        return merged(paths, len(tree.tokens) + shape.total_tokens, tree)

    def _shape(self, row: _Row, policy: ShapePolicy, num_rows: int) -> Tree | None:
        """What to draft for a row: nothing when one token is left, nothing past the context.

        Nothing either past the next change of all keys, or when such a change is due.
        """
        length = len(row.token_ids)
        shape = policy.shape(length, num_rows)
        if shape is None or row.remaining <= 1 or self._outgrown(row):
            return None
        ends = [self._max_positions, *(s for s in self._switches if s >= length)]
        return shape.limited(min(ends) - length)

    def _take(self, row: _Row, request: Request, verdict: Verdict) -> Event:
        """Emit what a verdict brought, up to the row's end."""
        if self._drafter is not None and verdict.features is not None:
            self._drafter.observe(row.row, verdict.features)
        accepted = [request.tree.tokens[node] for node in verdict.accepted]
        tokens, reason = self._kept(row, [*accepted, verdict.next_token])
        sources = self._sources(request.tree, verdict)[: len(tokens)]
        result = row.result
        if row.prefilled:
            own = len(request.tree.tokens) - request.tree.num_copied
            result.accept_lengths.append(len(tokens))
            result.copied_lengths.append(sources.count("copy"))
            result.drafted_depths.append(max(request.tree.depths[:own], default=0))
            result.num_drafted += own
            for policy in (row.policy, row.branches):
                if policy is not None:
                    policy.observe(request.tree, verdict.accepted)
        row.base = request.base + len(request.known) + len(accepted)
        row.token_ids += tokens
        result.token_ids += tokens
        result.sources += sources
        result.logprobs += verdict.logprobs[: len(tokens)]
        if reason is not None:
            self._finish(row, reason)
        return Event(row.handle, tuple(tokens), tuple(sources), reason)

    @staticmethod
    def _sources(tree: DraftTree, verdict: Verdict) -> list[Source]:
        """Who proposed each token of a verdict."""
        own = len(tree.tokens) - tree.num_copied
        sources: list[Source] = ["draft" if node < own else "copy" for node in verdict.accepted]
        return [*sources, "target"]

    def _kept(self, row: _Row, tokens: list[int]) -> tuple[list[int], StopReason | None]:
        """Tokens up to and including the first that ends the row, and why it ends."""
        room = self._max_positions - len(row.token_ids)
        for i, token in enumerate(tokens, start=1):
            if token in row.stop_token_ids:
                return tokens[:i], "stop_token"
            if row.stop and (found := row.stop.push(token)):
                row.result.stop_string = found
                return tokens[:i], "stop_string"
            if i == row.remaining:
                return tokens[:i], "max_new_tokens"
            if i == room:
                return tokens[:i], "context"
        return tokens, None

    def _finish(self, row: _Row, reason: StopReason) -> None:
        row.result.stop_reason = reason
        row.result.timing.total_s = time.perf_counter() - row.started
        del self._rows[row.handle]
        self._verifier.close(row.row)
        if self._drafter is not None:
            self._drafter.close(row.row)


def check_prompt(prompt_ids: Sequence[int], vocab_size: int, max_positions: int) -> None:
    """Raise PromptError for a prompt that the target cannot take."""
    if not prompt_ids:
        raise PromptError("The prompt is empty; give at least one token.")
    if len(prompt_ids) >= max_positions:
        raise PromptError(
            f"The prompt has {len(prompt_ids)} tokens; the target's context of {max_positions} "
            "leaves no room to generate. Shorten the prompt."
        )
    outside = [token for token in prompt_ids if not 0 <= token < vocab_size]
    if outside:
        raise PromptError(
            f"Token id {outside[0]} is outside the target's vocabulary (0..{vocab_size - 1}). "
            "Was another tokenizer used?"
        )


def check_bias(sampling: SamplingParams, vocab_size: int) -> None:
    """Raise InputError for a bias on tokens that the target does not have."""
    outside = [token for token in sampling.logit_bias if token >= vocab_size]
    if outside:
        raise InputError(
            f"logit_bias names token id {outside[0]}, outside the target's vocabulary "
            f"(0..{vocab_size - 1})."
        )


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits, also inside a running event loop (a notebook)."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return cast(T, done.value)
    coroutine.close()
    raise RuntimeError("This verifier waits for a network; use `await engine.astep()`.")
