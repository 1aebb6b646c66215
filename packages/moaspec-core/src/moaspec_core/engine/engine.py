"""The decoding loop of every deployment but vLLM, which has its own.

A request joins (`add`), advances by one round per `step`, and leaves when it ends or by `abort`.
One round drafts, verifies the drafts in one pass of the target, accepts the drafts that the target
itself chooses, and emits them.
"""

import time
from collections import Counter
from collections.abc import Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.drafting.protocols import (
    Proposer,
    RequestText,
    Verifier,
    VerifyRequest,
    VerifyResult,
)
from moaspec_core.drafting.tree_shapes import DEFAULT_TREE
from moaspec_core.engine.position_rules import PositionRules, TargetInfo
from moaspec_core.engine.request_state import (
    Event,
    GenerationResult,
    RequestState,
    Shape,
    StopReason,
)
from moaspec_core.engine.scheduler import Scheduler, Work
from moaspec_core.errors import ContextError, InputError, PromptError
from moaspec_core.policy.cost_model import KnownCosts
from moaspec_core.policy.ngram_branches import NgramBranches
from moaspec_core.policy.observed_times import ObservedTimes, RoundTime
from moaspec_core.policy.pass_budget import share_slots
from moaspec_core.sampling.params import GREEDY, SamplingParams, TextLogprobs
from moaspec_core.sampling.stop_strings import StopStrings, stop_strings
from moaspec_core.sampling.token_ids import as_integer, as_token_ids, common_length
from moaspec_core.support.torch_settings import plain_torch

T = TypeVar("T")

MAX_ENDED_RESULTS = 256
"""Ended requests whose results stay available; without a limit they would fill the memory."""


class Engine:
    """Decodes many requests with one verifier and at most one proposer.

    It holds requests by handle: active ones, kept ones, and results of ended ones.

    Args:
        proposer: drafts tokens; None is plain decoding.
        target: gives vocabulary size, context length, the lengths at which cached keys become
            invalid (rotary switches), and the tokenizer that stop strings need.
        max_positions: the longest text, where it is shorter than the target's context.
        step_s: seconds of a step; None where all requests are one user's, who waits for the last
            of them.

    Attributes:
        scheduler: chooses what each step contains.
    """

    def __init__(
        self,
        verifier: Verifier,
        proposer: Proposer | None = None,
        *,
        target: TargetInfo,
        max_positions: int | None = None,
        step_s: float | None = None,
    ) -> None:
        self._verifier, self._proposer = verifier, proposer
        rules = PositionRules.of(target, max_positions)
        self._max_positions = rules.max_positions
        self._rules = None if rules.are_plain else rules
        self._vocab_size, self._tokenizer = target.vocab_size, target.tokenizer
        self._active: dict[int, RequestState] = {}
        self._kept: dict[int, RequestState] = {}
        self._ended: dict[int, GenerationResult] = {}
        self._next_handle = 0
        self.scheduler = Scheduler(verifier.prompt_tokens, step_s)

    @property
    def num_active(self) -> int:
        """Requests that have not ended."""
        return len(self._active)

    def add(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        stop_token_ids: Iterable[int] = (),
        stop: str | Iterable[str] | None = (),
        shape: Shape = DEFAULT_TREE,
        free_branches: Tree | KnownCosts | None = None,
        sampling: SamplingParams = GREEDY,
        keep: bool = False,
        after: int | None = None,
        owner: str = "",
        priority: int = 0,
        scored: bool = False,
    ) -> int:
        """Let a request join; the next `step` processes its prompt.

        Args:
            prompt_ids: at least one token id.
            stop: strings that end the request as soon as its generated text contains one.
            shape: shape of the drafts, or a policy of this request that chooses it every round;
                None drafts nothing.
            free_branches: shape of n-gram branches, candidates from the request's own text that are
                verified beside the drafts and reported as copies, or the costs by which they are
                chosen; None for none.
            sampling: how tokens are chosen; a seed is drawn where one is needed and missing.
            keep: keep the cache row when the request ends, for a later request that comes `after`
                it, or until `forget`.
            after: handle of an ended request that was kept. Its cache row is taken over, and the
                tokens that both texts begin with are not computed again.
            owner: owners take turns by the work that they were served.
            priority: among the requests of one owner the lowest comes first.
            scored: whether log-probabilities of the prompt are wanted too. Not `after` another
                request, as all of the prompt must be read.

        Returns:
            A handle that events carry.

        Raises:
            PromptError: the prompt is empty, does not fit into the context, or has ids outside the
                vocabulary.
            InputError: `max_new_tokens` or a stop token is no integer of at least 0, a biased
                token is outside the vocabulary, stop strings lack a tokenizer, or `after` names a
                request that is not kept.
        """
        check_prompt(prompt_ids, self._vocab_size, self._max_positions)
        max_new_tokens = as_integer("max_new_tokens", max_new_tokens)
        stops = as_token_ids("stop_token_ids", stop_token_ids)
        check_bias(sampling, self._vocab_size)
        strings = stop_strings(stop)
        sampling = sampling.resolved().bound(stops, max_new_tokens)
        old = None if after is None else self._get_kept(after)
        matcher = StopStrings(strings, self._tokenizer, prompt_ids) if strings else None
        request = RequestState(
            handle=self._next_handle,
            cache_row=self._free_cache_row() if old is None else old.cache_row,
            token_ids=list(prompt_ids),
            prompt_length=len(prompt_ids),
            max_new_tokens=max_new_tokens,
            stop_token_ids=stops,
            stop=matcher,
            shape=shape,
            branches=None if free_branches is None else NgramBranches(free_branches),
            sampling=sampling,
            keep=keep,
            owner=owner,
            priority=priority,
            window=self._verifier.prompt_window,
            scores=TextLogprobs((), ()) if scored else None,
        )
        if old is not None:
            self._take_over(request, old)
        self._next_handle += 1
        self._active[request.handle] = request
        return request.handle

    def forget(self, handle: int) -> None:
        """Drop an ended request's result and kept cache row. InputError: it has neither."""
        if self._ended.pop(handle, None) is None or handle in self._kept:
            self._close(self._get_kept(handle))
            del self._kept[handle]

    def abort(self, handle: int) -> GenerationResult:
        """End a request and return what was generated; InputError where none is active."""
        if handle not in self._active:
            raise InputError(f"Request {handle} is not active: it has ended, or never joined.")
        request = self._active[handle]
        self._finish(request, "aborted")
        return request.result

    def set_back(self, handle: int) -> None:
        """Drop the keys of an active request; it is read again when a step next takes it.

        Its text, and what it goes on with, stay the same. InputError where none is active.
        """
        if handle not in self._active:
            raise InputError(f"Request {handle} is not active: it has ended, or never joined.")
        request = self._active[handle]
        self._close(request)
        if request.branches is not None:
            request.branches.drop_index()
        request.num_verified = 0
        if not request.prefilled:
            request.result.num_reused_tokens = 0

    def abort_all(self) -> None:
        """End every request at once."""
        for handle in list(self._active):
            self.abort(handle)

    def result(self, handle: int) -> GenerationResult:
        """The result of a request: so far while it is active, final afterwards.

        Results of kept requests are available until `forget`, or until another request comes after
        them; of the others, those of the `MAX_ENDED_RESULTS` requests that ended last.

        Raises:
            InputError: no such request, or it ended too many requests ago.
        """
        request = self._active.get(handle) or self._kept.get(handle)
        result = self._ended.get(handle) if request is None else request.result
        if result is None:
            raise InputError(
                f"There is no result of request {handle}: it never joined, was forgotten, or ended "
                f"more than {MAX_ENDED_RESULTS} requests ago. Ask for a result when the request "
                "joins."
            )
        return result

    def run(self) -> Generator[Event]:
        """Step until no request is left; closing the iterator early aborts the active ones."""
        try:
            while self._active:
                yield from self.step()
        finally:
            self.abort_all()

    def step(self, plan: Mapping[int, int] | None = None) -> list[Event]:
        """`astep` for a verifier that answers at once, such as the local one."""
        return run_now(self.astep(plan))

    def work(self) -> list[Work]:
        """What each request needs next; handles are the keys."""
        return [
            Work(
                key=request.handle,
                owner=request.owner,
                unread=request.num_unread,
                context=request.num_verified,
                priority=request.priority,
                whole=self._verifier.reads_whole,
            )
            for request in self._active.values()
            if request.max_new_tokens
        ]

    async def astep(self, plan: Mapping[int, int] | None = None) -> list[Event]:
        """Read prompts, or chunks of them, and advance requests that decode by one round.

        Args:
            plan: by handle, tokens to read, and any number for requests that decode; the others
                wait. None: by the scheduler.
        """
        if plan is None:
            plan = self.scheduler.next_step(self.work())
        ended = self._end_empty()
        # In the order of cache rows: adjacent rows are read without a copy.
        requests = sorted(self._active.values(), key=lambda request: request.cache_row)
        requests = [request for request in requests if request.handle in plan]
        running = [request for request in requests if not request.num_unread]
        reading = [request for request in requests if request.num_unread]
        last = [request for request in reading if plan[request.handle] >= request.num_unread]
        for request in reading:
            if plan[request.handle] < request.num_unread:
                await self._read_chunk(request, plan[request.handle])
        prefilled = await self._prefill(last) if last else []
        return ended + prefilled + (await self._round(running) if running else [])

    async def _read_chunk(self, request: RequestState, size: int) -> None:
        started_s = time.perf_counter()
        chunk = request.text_chunk(size)
        (result,) = await self._verifier.verify([chunk])
        elapsed_s = time.perf_counter() - started_s
        self._charge_reading([(request.owner, request.num_verified, size)], elapsed_s)
        request.record_scores(chunk, result)
        request.num_verified += size
        request.result.num_reused_tokens -= result.num_read_again
        request.result.timing.prefill_s += elapsed_s

    def _charge_reading(self, read: Sequence[tuple[str, int, int]], seconds: float) -> None:
        """Charge a pass that read; by text its owner, the tokens before, and those of the pass."""
        if not self.scheduler.is_shared:
            return
        costs, tokens = self.scheduler.reading, Counter[str]()
        looks = sum(size * (start + size / 2) for _, start, size in read)
        for owner, _, size in read:
            tokens[owner] += size
        costs.record(tokens.total(), looks / tokens.total(), seconds)
        self.scheduler.charge(costs, tokens, looks / tokens.total())

    def _charge_round(
        self, requests: Sequence[RequestState], asked: Sequence[VerifyRequest], seconds: float
    ) -> None:
        if not self.scheduler.is_shared:
            return
        costs, tokens = self.scheduler.rounds, Counter[str]()
        for request, sent in zip(requests, asked, strict=True):
            tokens[request.owner] += len(sent.new_tokens) + len(sent.tree.tokens)
        looks = sum(request.num_verified for request in requests) / len(requests)
        costs.record(len(requests), looks, seconds)
        self.scheduler.charge(costs, tokens, looks, rows=len(requests))

    async def _prefill(self, requests: Sequence[RequestState]) -> list[Event]:
        """Process prompts: one target pass for all of them."""
        started_s = time.perf_counter()
        read = [(r.owner, r.num_verified, r.num_unread) for r in requests]
        for request in requests:
            self._begin_policy(request)
        prompts = [
            request.verify_request(request.token_ids[request.num_verified :], DraftTree())
            for request in requests
        ]
        verified = await self._verifier.verify(prompts)
        events = self._emit(requests, prompts, verified)
        elapsed_s = time.perf_counter() - started_s
        self._charge_reading(read, elapsed_s)
        for request, result in zip(requests, verified, strict=True):
            request.result.timing.prefill_s += elapsed_s
            request.result.num_reused_tokens -= result.num_read_again
        return events

    async def _round(self, requests: Sequence[RequestState]) -> list[Event]:
        """Draft, verify, accept, emit: one target pass for all requests."""
        started_s, times = time.perf_counter(), _shared_times(requests)
        if times is not None:
            times.begin_round(shared=True)
        trees = self._draft(requests)
        drafted_s = time.perf_counter()
        asked = [self._verify_request(*pair) for pair in zip(requests, trees, strict=True)]
        verified = await self._verifier.verify(asked)
        events = self._emit(requests, asked, verified)
        verify_s = time.perf_counter() - drafted_s
        self._charge_round(requests, asked, drafted_s - started_s + verify_s)
        for request in requests:
            request.add_seconds(drafted_s - started_s, verify_s, verified)
        if times is not None:
            _record(times, requests, started_s, max(result.encode_s for result in verified))
        return events

    def _draft(self, requests: Sequence[RequestState]) -> list[DraftTree]:
        """A tree for each request; requests that want the same shape are drafted together."""
        trees = [DraftTree()] * len(requests)
        if len(requests) == 1 and (policy := requests[0].policy) is not None and policy.rests():
            return trees
        by_shape: dict[Tree, list[int]] = {}
        for i, request in enumerate(requests):
            shape = self._shape(request, len(requests))
            if shape is not None:
                by_shape.setdefault(shape, []).append(i)
        for shape, indices in by_shape.items():
            assert self._proposer is not None, "nothing has a shape without it"
            texts = [
                RequestText(request.cache_row, request.token_ids, request.sampling)
                for request in map(requests.__getitem__, indices)
            ]
            with plain_torch():
                drafted = self._proposer.propose(texts, shape)
            for i, tree in zip(indices, drafted, strict=True):
                trees[i] = tree
        trees = share_slots(trees, by_shape) if len(requests) > 1 else trees
        return [
            tree if request.branches is None else request.branches.joined(tree)
            for request, tree in zip(requests, trees, strict=True)
        ]

    def _shape(self, request: RequestState, num_requests: int) -> Tree | None:
        """The shape to draft, cut where the request, the context or cached keys' validity ends."""
        copied, length, shape = 0.0, len(request.token_ids), request.shape
        end = self._rules.end_of_drafts(length) if self._rules is not None else self._max_positions
        # A round emits one token more than its drafts are deep.
        depth = min(end - length, request.num_remaining - 1) if self._keeps_keys(request) else 0
        policy = request.policy
        if policy is not None and policy.times is not None and policy.times.plain_now:
            depth = 0
        if request.branches is not None:
            copies = depth if policy is None or policy.wants_copies else 0
            copied = request.branches.look_up(request.token_ids, num_requests, copies)
        if self._proposer is None or shape is None:
            return None
        if not isinstance(shape, Tree):
            shape = shape.shape(length, num_requests, copied)
        return None if shape is None else shape.limited(depth)

    def _keeps_keys(self, request: RequestState) -> bool:
        """Whether cached keys are still valid: some rotary embeddings change with the length."""
        rules, length = self._rules, len(request.token_ids)
        return rules is None or rules.keeps_keys(request.num_verified, length)

    def _verify_request(self, request: RequestState, tree: DraftTree) -> VerifyRequest:
        """The newest token and its drafts; the whole text without, if its keys became invalid."""
        if self._keeps_keys(request):
            return request.verify_request(request.token_ids[-1:], request.without_endings(tree))
        if self._proposer is not None:
            self._proposer.close(request.cache_row)
        request.num_verified = 0  # the pass overwrites its keys, even if it is interrupted
        self._begin_policy(request)
        return request.verify_request(request.token_ids, DraftTree())

    def _emit(
        self,
        requests: Sequence[RequestState],
        asked: Sequence[VerifyRequest],
        verified: Sequence[VerifyResult],
    ) -> list[Event]:
        """Append the verified tokens to each request; end complete requests."""
        events: list[Event] = []
        for request, sent, result in zip(requests, asked, verified, strict=True):
            self.scheduler.charge_seconds(request.owner, result.process_s)
            if self._proposer is not None and result.features is not None:
                with plain_torch():
                    self._proposer.append_features(request.cache_row, result.features)
            event = request.append_verified(sent, result, self._max_positions)
            if event.stop_reason is not None:
                self._finish(request, event.stop_reason)
            events.append(event)
        return events

    def _end_empty(self) -> list[Event]:
        """End requests for 0 tokens; they need no pass."""
        empty = [request for request in self._active.values() if request.max_new_tokens == 0]
        for request in empty:
            self._finish(request, "max_new_tokens")
        return [Event(request.handle, (), (), "max_new_tokens") for request in empty]

    def _take_over(self, request: RequestState, old: RequestState) -> None:
        """Reuse the cached keys of an old request, except for the last token of the prompt.

        If the old request never ran, the cache row still holds the keys of the request before it.
        """
        request.num_verified = 0
        if self._rules is None or self._rules.shares_keys(
            old.num_verified if old.prefilled else len(old.token_ids),
            len(request.token_ids),
            old.prompt_length,
            request.prompt_length,
        ):
            common = common_length(old.token_ids, request.token_ids[:-1])
            request.num_verified = min(common, old.num_verified)
        request.result.num_reused_tokens = request.num_verified
        self._verifier.cut(request.cache_row, request.num_verified)
        if self._proposer is not None:
            self._proposer.rollback(request.cache_row, request.num_verified)
        del self._kept[old.handle]

    def _get_kept(self, handle: int) -> RequestState:
        if handle not in self._kept:
            raise InputError(
                f"Request {handle} is not kept: add it with keep=True and let it end first."
            )
        return self._kept[handle]

    def _free_cache_row(self) -> int:
        """The first cache row that neither an active nor a kept request uses."""
        used = {request.cache_row for request in (*self._active.values(), *self._kept.values())}
        return next(i for i in range(len(used) + 1) if i not in used)

    def _begin_policy(self, request: RequestState) -> None:
        """Tell a request's policy how many tokens the next pass would encode."""
        policy, unread = request.policy, request.token_ids[request.num_verified :]
        if policy is None:
            return
        asked = request.verify_request(unread, DraftTree())
        num_unread = len(self._verifier.encoded_range(asked)[1])
        first, encoded = self._verifier.encoded_range(replace(asked, window=0))
        if asked.window and encoded.start - first >= asked.window:
            # A narrow window would drop the features of an earlier turn.
            num_unread = len(encoded)
            policy.window = 0
        policy.begin(
            num_unread,
            request.num_remaining,
            self.num_active,
            length=len(request.token_ids),
            window=request.window,
        )

    def _finish(self, request: RequestState, reason: StopReason) -> None:
        request.result.stop_reason = reason
        request.result.timing.total_s = time.perf_counter() - request.started_s
        del self._active[request.handle]
        self._ended[request.handle] = request.result
        if len(self._ended) > MAX_ENDED_RESULTS:
            del self._ended[next(iter(self._ended))]
        if request.keep:
            self._kept[request.handle] = request
        else:
            self._close(request)

    def _close(self, request: RequestState) -> None:
        self._verifier.close(request.cache_row)
        if self._proposer is not None:
            self._proposer.close(request.cache_row)


def _shared_times(requests: Sequence[RequestState]) -> ObservedTimes | None:
    """The observed times that the policies of all requests share; None if they share none."""
    all_times = [None if request.policy is None else request.policy.times for request in requests]
    if all_times[0] is not None and all(times is all_times[0] for times in all_times):
        return all_times[0]
    for times in all_times:
        if times is not None:
            times.begin_round(shared=False)
    return None


def _record(
    times: ObservedTimes, requests: Sequence[RequestState], started_s: float, encode_s: float
) -> None:
    """Hand the time of a round of all these requests on, if the costs of all are known."""
    plain_s = expected_s = 0.0
    for request in requests:
        if request.policy is not None:
            own_plain_s, own_s = request.policy.round_s
            if own_plain_s <= 0:
                return
            plain_s, expected_s = plain_s + own_plain_s, expected_s + own_s
    ended_s = time.perf_counter()
    seconds = ended_s - started_s - (encode_s if expected_s <= plain_s else 0.0)
    times.record(RoundTime(ended_s, seconds, plain_s, expected_s))


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits, also inside a running event loop (a notebook)."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return cast(T, done.value)
    coroutine.close()
    raise RuntimeError("This verifier waits for a network; use `await engine.astep()`.")


def context_message(max_positions: int, given: str) -> str:
    """The start of an error's text; many clients recognise it by these words of OpenAI's."""
    return f"This model's maximum context length is {max_positions} tokens. However, {given}. "


def check_prompt(prompt_ids: Sequence[int], vocab_size: int, max_positions: int) -> None:
    """Raise PromptError for a prompt that the target cannot take."""
    if not prompt_ids:
        raise PromptError("The prompt is empty; give at least one token.")
    if len(prompt_ids) >= max_positions:
        raise ContextError(
            context_message(max_positions, f"your prompt has {len(prompt_ids)} tokens")
            + "That leaves no room to generate. Shorten the prompt."
        )
    outside = [token for token in prompt_ids if not 0 <= token < vocab_size]
    if outside:
        raise PromptError(
            f"Token id {outside[0]} is outside the target's vocabulary (0..{vocab_size - 1}). "
            "Was another tokenizer used?"
        )


def check_bias(sampling: SamplingParams, vocab_size: int) -> None:
    """Raise InputError for a logit bias on a token that the target does not have."""
    outside = [token for token in sampling.logit_bias if token >= vocab_size]
    if outside:
        raise InputError(
            f"logit_bias names token id {outside[0]}, outside the target's vocabulary "
            f"(0..{vocab_size - 1})."
        )
