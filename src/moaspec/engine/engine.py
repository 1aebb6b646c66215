"""The engine: every deployment's decoding loop.

Rows join (`add`), advance together by one round (`step`) and leave (`abort`, or by finishing), each
with its own length and acceptance. A round is: draft, verify, take in what was verified.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine, Generator, Iterable, Sequence
from typing import Any, TypeVar, cast

from moaspec.drafting.draft_tree import AUTO, DraftTree, Tree
from moaspec.drafting.policy.policies import DraftPolicy, FixedPolicy
from moaspec.drafting.protocols import Drafter, RowText, Verifier, VerifyRequest, VerifyResult
from moaspec.engine.request_state import RequestState, check_bias, check_prompt
from moaspec.engine.result import Event, GenerationResult, StopReason
from moaspec.errors import InputError
from moaspec.sampling.params import GREEDY, SamplingParams
from moaspec.sampling.stop_strings import StopStrings, stop_strings
from moaspec.sampling.token_ids import as_integer, as_token_ids, common_length
from moaspec.support.torch_settings import plain_torch

T = TypeVar("T")

RESULTS_KEPT = 256
"""Results of ended requests that an engine still answers for; they must not grow without end."""


class Engine:
    """Decodes many rows with one verifier and at most one drafter.

    Args:
        verifier: holds the target.
        drafter: proposes tokens; None is plain decoding.
        vocab_size, max_positions: the target's, for checking prompts and ending at its context.
        tokenizer: the target's; only stop strings need it.
        rope_switches: lengths beyond which the keys of a whole text change; see
            `Target.rope_switches`. A draft never crosses one, and a row that did is read anew.
        rope_growth: length beyond which keys depend on the length of the prompt; see
            `Target.rope_growth`. Keys of another prompt are not kept where either is longer.
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
        rope_growth: int | None = None,
    ) -> None:
        self._verifier, self._drafter = verifier, drafter
        self._growth = rope_growth
        self._vocab_size, self._max_positions = vocab_size, max_positions
        self._tokenizer, self._switches = tokenizer, tuple(rope_switches)
        self._rows: dict[int, RequestState] = {}
        self._parked: dict[int, RequestState] = {}
        self._ended: dict[int, GenerationResult] = {}
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
        stop: str | Iterable[str] | None = (),
        shape: Tree | DraftPolicy = AUTO,
        free_branches: Tree | DraftPolicy | None = None,
        sampling: SamplingParams = GREEDY,
        keep: bool = False,
        after: int | None = None,
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
            keep: hold the row's caches when it ends, for a later request to come `after` it or
                until `forget`.
            after: handle of a row that ended and was kept. Its place is taken over, and what its
                text shares with the beginning of the prompt is not computed again.

        Returns:
            A handle that events carry.

        Raises:
            PromptError: empty, as long as the context or longer, or ids outside the vocabulary.
            InputError: `max_new_tokens` or stop tokens that are no integers of at least 0, a biased
                token outside the vocabulary, stop strings without a tokenizer, or `after` a row
                that is not kept.
        """
        check_prompt(prompt_ids, self._vocab_size, self._max_positions)
        max_new_tokens = as_integer("max_new_tokens", max_new_tokens)
        stops = as_token_ids("stop_token_ids", stop_token_ids)
        check_bias(sampling, self._vocab_size)
        strings = stop_strings(stop)
        sampling = sampling.resolved().bound(stops, max_new_tokens)
        old = None if after is None else self._parked_row(after)
        row = RequestState(
            handle=self._next_handle,
            cache_row=self._free_row() if old is None else old.cache_row,
            token_ids=list(prompt_ids),
            max_new_tokens=max_new_tokens,
            stop_token_ids=stops,
            stop=StopStrings(strings, self._tokenizer, prompt_ids) if strings else None,
            policy=FixedPolicy(shape) if isinstance(shape, Tree) else shape,
            branches=(
                FixedPolicy(free_branches) if isinstance(free_branches, Tree) else free_branches
            ),
            sampling=sampling,
            prompt_length=len(prompt_ids),
            keep=keep,
            result=GenerationResult(seed=sampling.seed),
        )
        if old is not None:
            self._take_over(row, old)
        self._next_handle += 1
        self._rows[row.handle] = row
        return row.handle

    def forget(self, handle: int) -> None:
        """Let go of a request that ended: of its result, and of its caches where they were kept.

        Raises:
            InputError: it is not kept.
        """
        if self._ended.pop(handle, None) is None or handle in self._parked:
            row = self._parked_row(handle)
            del self._parked[handle]
            self._close(row)

    def _parked_row(self, handle: int) -> RequestState:
        if handle not in self._parked:
            raise InputError(
                f"Request {handle} is not kept: add it with keep=True and let it end first."
            )
        return self._parked[handle]

    def _free_row(self) -> int:
        used = {row.cache_row for rows in (self._rows, self._parked) for row in rows.values()}
        return next(i for i in range(len(used) + 1) if i not in used)

    def _take_over(self, row: RequestState, old: RequestState) -> None:
        """Keep of an old row what is the same in the new one; its last token is always read."""
        common = common_length(old.token_ids, row.token_ids[:-1])
        # A row that never ran holds what it took over; that is of the regime of its own length.
        held = old.num_verified if old.prefilled else len(old.token_ids)
        same_keys = self._regime(held) == self._regime(len(row.token_ids)) and not outgrown(
            (old.prompt_length, row.prompt_length), self._growth
        )
        row.num_verified = min(common, old.num_verified) if same_keys else 0
        row.result.num_reused_tokens = row.num_verified
        if self._drafter is not None:
            self._drafter.rollback(row.cache_row, row.num_verified)
        del self._parked[old.handle]

    def _regime(self, length: int) -> int:
        return regime(length, self._switches)

    def abort(self, handle: int) -> GenerationResult:
        """Let a request leave at once; what was generated so far is returned.

        Raises:
            InputError: it is not active: it ended before, or no request has this handle.
        """
        if handle not in self._rows:
            raise InputError(f"Request {handle} is not active: it has ended, or never joined.")
        row = self._rows[handle]
        self._finish(row, "aborted")
        return row.result

    def result(self, handle: int) -> GenerationResult:
        """The result of a request: so far while it is active, final afterwards.

        Results of kept rows are there until `forget`, or until another row comes after them; of
        the others, those of the `RESULTS_KEPT` requests that ended last.

        Raises:
            InputError: no such request, or it ended long ago.
        """
        row = self._rows.get(handle) or self._parked.get(handle)
        result = self._ended.get(handle) if row is None else row.result
        if result is None:
            raise InputError(
                f"There is no result of request {handle}: it never joined, was forgotten, or ended "
                f"more than {RESULTS_KEPT} requests ago. Ask for a result when the request joins."
            )
        return result

    def run(self) -> Generator[Event]:
        """Step until no row is left; closing the iterator early aborts those that are."""
        try:
            while self._rows:
                yield from self.step()
        finally:
            self.abort_all()

    def abort_all(self) -> None:
        """Let every request leave at once."""
        for handle in list(self._rows):
            self.abort(handle)

    def step(self) -> list[Event]:
        """`astep` for a verifier that answers at once, such as the local one."""
        return run_now(self.astep())

    async def astep(self) -> list[Event]:
        """Process new prompts and advance every other row by one round."""
        events = self._end_at_once()
        # In the order of their places: neighbours' caches are read without a copy.
        rows = sorted(self._rows.values(), key=lambda row: row.cache_row)
        fresh = [row for row in rows if not row.prefilled]
        running = [row for row in rows if row.prefilled]
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

    async def _prefill(self, rows: Sequence[RequestState]) -> list[Event]:
        started = time.perf_counter()
        for row in rows:
            row.policy.begin(
                len(row.token_ids) - row.num_verified, row.max_new_tokens, len(self._rows)
            )
        requests = [
            row.request(row.num_verified, row.token_ids[row.num_verified :], DraftTree())
            for row in rows
        ]
        verdicts = await self._verifier.verify(requests)
        events = [
            self._take(row, request, verdict)
            for row, request, verdict in zip(rows, requests, verdicts, strict=True)
        ]
        elapsed = time.perf_counter() - started
        for row in rows:
            row.result.timing.prefill_s += elapsed
        return events

    async def _round(self, rows: Sequence[RequestState]) -> list[Event]:
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
        encode_s = max(verdict.encode_s for verdict in verdicts)
        pass_s = verdicts[0].pass_s
        verify_s = time.perf_counter() - drafted - encode_s if pass_s is None else pass_s
        for row in rows:
            row.result.timing.draft_s += drafted - started
            row.result.timing.verify_s += verify_s
            row.result.timing.encode_s += encode_s
        return events

    def _request(self, row: RequestState, tree: DraftTree) -> VerifyRequest:
        """The newest token and its drafts; the whole text where all its keys have changed."""
        if not self._outgrown(row):
            return row.request(row.num_verified, row.token_ids[-1:], row.unended(tree))
        if self._drafter is not None:
            self._drafter.close(row.cache_row)
        row.num_verified = (
            0  # from here on its keys are written over, even if this pass is interrupted
        )
        row.policy.begin(len(row.token_ids), row.remaining, len(self._rows))
        return row.request(0, row.token_ids, DraftTree())

    def _outgrown(self, row: RequestState) -> bool:
        """Whether the text crossed a switch of its rotary embeddings since it was verified."""
        return self._regime(row.num_verified) != self._regime(len(row.token_ids))

    @plain_torch()
    def _draft(self, rows: Sequence[RequestState]) -> list[DraftTree]:
        """Trees for all rows; rows that want the same shape are drafted together."""
        trees = [DraftTree()] * len(rows)
        by_shape: dict[Tree, list[int]] = {}
        for i, row in enumerate(rows):
            shape = self._shape(row, row.policy, len(rows)) if self._drafter else None
            if shape is not None:
                by_shape.setdefault(shape, []).append(i)
        for shape, indices in by_shape.items():
            assert self._drafter is not None
            texts = [
                RowText(rows[i].cache_row, rows[i].token_ids, rows[i].sampling) for i in indices
            ]
            drafts = self._drafter.propose(texts, shape)
            for i, tree in zip(indices, drafts, strict=True):
                trees[i] = tree
        return [
            row.branched(tree, self._shape(row, row.branches, len(rows)))
            for row, tree in zip(rows, trees, strict=True)
        ]

    def _shape(self, row: RequestState, policy: DraftPolicy | None, num_rows: int) -> Tree | None:
        """What to draft for a row: nothing past its last token, nothing past the context.

        Nothing either past the next change of all keys, or when such a change is due.
        """
        length = len(row.token_ids)
        shape = None if policy is None else policy.shape(length, num_rows)
        if shape is None or self._outgrown(row):
            return None
        ends = [self._max_positions, *(s for s in self._switches if s >= length)]
        # A round writes one token more than its drafts are deep.
        return shape.limited(min(min(ends) - length, row.remaining - 1))

    @plain_torch()
    def _take(self, row: RequestState, request: VerifyRequest, verdict: VerifyResult) -> Event:
        """Emit what a verdict brought, up to the row's end."""
        if self._drafter is not None and verdict.features is not None:
            self._drafter.observe(row.cache_row, verdict.features)
        tree = request.tree if verdict.tree is None else verdict.tree
        accepted = [tree.tokens[node] for node in verdict.accepted]
        tokens, reason = row.kept([*accepted, verdict.next_token], self._max_positions)
        sources = row.sources(tree, verdict.accepted)[: len(tokens)]
        if row.prefilled:
            row.count(tree, verdict.accepted, sources)
        row.prefilled = True
        row.num_verified = request.num_verified + len(request.new_tokens) + len(accepted)
        row.token_ids += tokens
        row.result.token_ids += tokens
        row.result.sources += sources
        logprobs = verdict.logprobs[: len(tokens)]
        top_logprobs = verdict.top_logprobs[: len(tokens)]
        row.result.logprobs += logprobs
        row.result.top_logprobs += top_logprobs
        if reason is not None:
            self._finish(row, reason)
        return Event(
            row.handle,
            tuple(tokens),
            tuple(sources),
            reason,
            tree=tree,
            accepted=verdict.accepted,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
        )

    def _finish(self, row: RequestState, reason: StopReason) -> None:
        row.result.stop_reason = reason
        row.result.timing.total_s = time.perf_counter() - row.started
        del self._rows[row.handle]
        self._ended[row.handle] = row.result
        if len(self._ended) > RESULTS_KEPT:
            del self._ended[next(iter(self._ended))]
        if row.keep:
            self._parked[row.handle] = row
        else:
            self._close(row)

    def _close(self, row: RequestState) -> None:
        self._verifier.close(row.cache_row)
        if self._drafter is not None:
            self._drafter.close(row.cache_row)


def regime(length: int, switches: Sequence[int]) -> int:
    """Which rotary embeddings the keys of a text of this length have; see `Engine`."""
    return sum(length > switch for switch in switches)


def outgrown(prompt_lengths: Iterable[int], growth: int | None) -> bool:
    """Whether one of these prompts is too long to share keys with the other; see `Engine`."""
    return growth is not None and max(prompt_lengths) > growth


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits, also inside a running event loop (a notebook)."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return cast(T, done.value)
    coroutine.close()
    raise RuntimeError("This verifier waits for a network; use `await engine.astep()`.")
