"""The decoding loop of every deployment but vLLM, which has its own.

A request joins (`add`), advances by one round per `step`, and leaves when it ends or by `abort`.
One round drafts, verifies the drafts in one pass of the target, accepts the drafts that the target
itself chooses, and emits them.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine, Generator, Iterable, Sequence
from typing import Any, TypeVar, cast

from moaspec.drafting.draft_tree import AUTO, DraftTree, Tree
from moaspec.drafting.policy.policies import DraftPolicy, FixedPolicy
from moaspec.drafting.protocols import Drafter, RowText, Verifier, VerifyRequest, VerifyResult
from moaspec.engine.position_rules import PositionRules, TargetFacts
from moaspec.engine.request_state import RequestState, check_bias, check_prompt
from moaspec.engine.request_table import RequestTable
from moaspec.engine.result import Event, GenerationResult, StopReason
from moaspec.sampling.params import GREEDY, SamplingParams
from moaspec.sampling.stop_strings import StopStrings, stop_strings
from moaspec.sampling.token_ids import as_integer, as_token_ids, common_length
from moaspec.support.torch_settings import plain_torch

T = TypeVar("T")


class Engine:
    """Decodes many requests with one verifier and at most one drafter.

    Args:
        verifier: holds the target.
        drafter: proposes tokens; None is plain decoding.
        target: gives vocabulary size, context length, the lengths at which cached keys become
            invalid (rotary switches), and the tokenizer that stop strings need.
        max_positions: the longest text, where it is shorter than the target's context.
    """

    def __init__(
        self,
        verifier: Verifier,
        drafter: Drafter | None = None,
        *,
        target: TargetFacts,
        max_positions: int | None = None,
    ) -> None:
        self._verifier, self._drafter = verifier, drafter
        self._rules = PositionRules.of(target, max_positions)
        self._vocab_size, self._tokenizer = target.vocab_size, target.tokenizer
        self._requests = RequestTable()

    @property
    def num_active(self) -> int:
        """Requests that have not ended."""
        return len(self._requests.active)

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
        """Let a request join; the next `step` processes its prompt.

        Args:
            prompt_ids: at least one token id.
            max_new_tokens: limit of generated tokens; with 0 the next `step` ends the request.
            stop_token_ids: ids that end the request.
            stop: strings that end the request as soon as its generated text contains one.
            shape: shape of the drafts, or a policy of this request that chooses it every round.
            free_branches: the same for n-gram branches, candidates from the request's own text that
                are verified beside the drafts and reported as copies; None for none.
            sampling: how tokens are chosen; a seed is drawn where one is needed and missing.
            keep: keep the cache row when the request ends, for a later request that comes `after`
                it, or until `forget`.
            after: handle of an ended request that was kept. Its cache row is taken over, and the
                tokens that both texts begin with are not computed again.

        Returns:
            A handle that events carry.

        Raises:
            PromptError: the prompt is empty, does not fit into the context, or has ids outside the
                vocabulary.
            InputError: `max_new_tokens` or stop tokens that are no integers of at least 0, a biased
                token outside the vocabulary, stop strings without a tokenizer, or `after` names a
                request that is not kept.
        """
        check_prompt(prompt_ids, self._vocab_size, self._rules.max_positions)
        max_new_tokens = as_integer("max_new_tokens", max_new_tokens)
        stops = as_token_ids("stop_token_ids", stop_token_ids)
        check_bias(sampling, self._vocab_size)
        strings = stop_strings(stop)
        sampling = sampling.resolved().bound(stops, max_new_tokens)
        old = None if after is None else self._requests.get_kept(after)
        matcher = StopStrings(strings, self._tokenizer, prompt_ids) if strings else None
        request = RequestState(
            handle=self._requests.new_handle(),
            cache_row=self._requests.free_cache_row() if old is None else old.cache_row,
            token_ids=list(prompt_ids),
            prompt_length=len(prompt_ids),
            max_new_tokens=max_new_tokens,
            stop_token_ids=stops,
            stop=matcher,
            policy=_policy(shape),
            branch_policy=None if free_branches is None else _policy(free_branches),
            sampling=sampling,
            keep=keep,
        )
        if old is not None:
            self._take_over(request, old)
        self._requests.active[request.handle] = request
        return request.handle

    def _take_over(self, request: RequestState, old: RequestState) -> None:
        """Reuse the cached keys of an old request, except for the last token of the prompt.

        If the old request never ran, the cache row still holds the keys of the request before it.
        """
        request.num_verified = 0
        if self._rules.shares_keys(
            old.num_verified if old.prefilled else len(old.token_ids),
            len(request.token_ids),
            old.prompt_length,
            request.prompt_length,
        ):
            common = common_length(old.token_ids, request.token_ids[:-1])
            request.num_verified = min(common, old.num_verified)
        request.result.num_reused_tokens = request.num_verified
        if self._drafter is not None:
            self._drafter.rollback(request.cache_row, request.num_verified)
        del self._requests.kept[old.handle]

    def forget(self, handle: int) -> None:
        """Drop the result of an ended request, and free its cache row if that was kept.

        Raises:
            InputError: nothing is held of it.
        """
        kept = self._requests.forget(handle)
        if kept is not None:
            self._close(kept)

    def abort(self, handle: int) -> GenerationResult:
        """End a request at once and return what was generated so far.

        Raises:
            InputError: it has ended, or no request has this handle.
        """
        request = self._requests.get_active(handle)
        self._finish(request, "aborted")
        return request.result

    def abort_all(self) -> None:
        """End every request at once."""
        for handle in list(self._requests.active):
            self.abort(handle)

    def result(self, handle: int) -> GenerationResult:
        """The result of a request: so far while it is active, final afterwards.

        Results of kept requests are available until `forget`, or until another request comes after
        them; of the others, those of the `MAX_ENDED_RESULTS` requests that ended last.

        Raises:
            InputError: no such request, or it ended too many requests ago.
        """
        return self._requests.result(handle)

    def run(self) -> Generator[Event]:
        """Step until no request is left; closing the iterator early aborts the active ones."""
        try:
            while self._requests.active:
                yield from self.step()
        finally:
            self.abort_all()

    def step(self) -> list[Event]:
        """`astep` for a verifier that answers at once, such as the local one."""
        return run_now(self.astep())

    async def astep(self) -> list[Event]:
        """Process new prompts and advance every other request by one round."""
        ended = self._end_empty()
        # In the order of cache rows: adjacent rows are read without a copy.
        requests = sorted(self._requests.active.values(), key=lambda one: one.cache_row)
        new = [request for request in requests if not request.prefilled]
        running = [request for request in requests if request.prefilled]
        prefilled = await self._prefill(new) if new else []
        return ended + prefilled + (await self._round(running) if running else [])

    async def _prefill(self, requests: Sequence[RequestState]) -> list[Event]:
        """Process prompts: one target pass for all of them."""
        started_s = time.perf_counter()
        for request in requests:
            self._begin_policy(request, len(request.token_ids) - request.num_verified)
        prompts = [
            request.verify_request(request.token_ids[request.num_verified :], DraftTree())
            for request in requests
        ]
        verified = await self._verifier.verify(prompts)
        events = self._emit(requests, prompts, verified)
        elapsed_s = time.perf_counter() - started_s
        for request in requests:
            request.result.timing.prefill_s += elapsed_s
        return events

    async def _round(self, requests: Sequence[RequestState]) -> list[Event]:
        """Draft, verify, accept, emit: one target pass for all requests."""
        started_s = time.perf_counter()
        trees = self._draft(requests)
        drafted_s = time.perf_counter()
        drafts = [self._verify_request(*pair) for pair in zip(requests, trees, strict=True)]
        verified = await self._verifier.verify(drafts)
        events = self._emit(requests, drafts, verified)
        verify_s = time.perf_counter() - drafted_s
        for request in requests:
            request.result.timing.add_round(drafted_s - started_s, verify_s, verified)
        return events

    @plain_torch()
    def _draft(self, requests: Sequence[RequestState]) -> list[DraftTree]:
        """A tree for each request; requests that want the same shape are drafted together."""
        trees = [DraftTree()] * len(requests)
        if self._drafter is not None:
            by_shape: dict[Tree, list[int]] = {}
            for i, request in enumerate(requests):
                shape = self._shape(request, request.policy, len(requests))
                if shape is not None:
                    by_shape.setdefault(shape, []).append(i)
            for shape, indices in by_shape.items():
                texts = [
                    RowText(one.cache_row, one.token_ids, one.sampling)
                    for one in map(requests.__getitem__, indices)
                ]
                for i, tree in zip(indices, self._drafter.propose(texts, shape), strict=True):
                    trees[i] = tree
        return [
            request.with_branches(tree, self._shape(request, request.branch_policy, len(requests)))
            for request, tree in zip(requests, trees, strict=True)
        ]

    def _shape(
        self, request: RequestState, policy: DraftPolicy | None, num_requests: int
    ) -> Tree | None:
        """The shape to draft: not past the last token, the context or a LongRoPE switch."""
        length = len(request.token_ids)
        shape = None if policy is None else policy.shape(length, num_requests)
        if shape is None or not self._rules.keeps_keys(request.num_verified, length):
            return None
        # A round emits one token more than its drafts are deep.
        room = min(self._rules.end_of_drafts(length) - length, request.num_remaining - 1)
        return shape.limited(room)

    def _verify_request(self, request: RequestState, tree: DraftTree) -> VerifyRequest:
        """The newest token and its drafts; the whole text, undrafted, after a LongRoPE switch."""
        if self._rules.keeps_keys(request.num_verified, len(request.token_ids)):
            return request.verify_request(request.token_ids[-1:], request.without_endings(tree))
        if self._drafter is not None:
            self._drafter.close(request.cache_row)
        request.num_verified = 0  # the pass overwrites its keys, even if it is interrupted
        self._begin_policy(request, len(request.token_ids))
        return request.verify_request(request.token_ids, DraftTree())

    def _begin_policy(self, request: RequestState, num_unread: int) -> None:
        request.policy.begin(num_unread, request.num_remaining, self.num_active)

    @plain_torch()
    def _emit(
        self,
        requests: Sequence[RequestState],
        verify_requests: Sequence[VerifyRequest],
        verified: Sequence[VerifyResult],
    ) -> list[Event]:
        """Append the verified tokens to each request; end complete requests."""
        events: list[Event] = []
        for request, asked, result in zip(requests, verify_requests, verified, strict=True):
            if self._drafter is not None and result.features is not None:
                self._drafter.observe(request.cache_row, result.features)
            event = request.append_verified(asked, result, self._rules.max_positions)
            if event.stop_reason is not None:
                self._finish(request, event.stop_reason)
            events.append(event)
        return events

    def _end_empty(self) -> list[Event]:
        """End requests for 0 tokens; they need no pass."""
        empty = [one for one in self._requests.active.values() if one.max_new_tokens == 0]
        for request in empty:
            self._finish(request, "max_new_tokens")
        return [Event(request.handle, (), (), "max_new_tokens") for request in empty]

    def _finish(self, request: RequestState, reason: StopReason) -> None:
        request.result.stop_reason = reason
        request.result.timing.total_s = time.perf_counter() - request.started_s
        self._requests.end(request)
        if not request.keep:
            self._close(request)

    def _close(self, request: RequestState) -> None:
        self._verifier.close(request.cache_row)
        if self._drafter is not None:
            self._drafter.close(request.cache_row)


def _policy(shape: Tree | DraftPolicy) -> DraftPolicy:
    return FixedPolicy(shape) if isinstance(shape, Tree) else shape


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits, also inside a running event loop (a notebook)."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return cast(T, done.value)
    coroutine.close()
    raise RuntimeError("This verifier waits for a network; use `await engine.astep()`.")
