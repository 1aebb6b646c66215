"""The decoding loop of every deployment but vLLM, which has its own.

A request joins (`add`), advances by one round per `step`, and leaves when it ends or by `abort`.
One round drafts, verifies the drafts in one pass of the target, accepts the drafts that the target
itself chooses, and emits them.
"""

import sys
import time
from collections.abc import Collection, Coroutine, Generator, Sequence
from typing import Any, TypeVar, cast

from moaspec.drafting.draft_tree import DraftTree, Tree
from moaspec.drafting.policy.observed_times import ObservedTimes, RoundTime
from moaspec.drafting.policy.pass_budget import share_slots
from moaspec.drafting.protocols import RequestText, VerifyRequest, VerifyResult
from moaspec.engine.request_state import RequestState
from moaspec.engine.request_table import RequestTable
from moaspec.engine.result import Event

T = TypeVar("T")


class Engine(RequestTable):
    """Decodes many requests with one verifier and at most one proposer; see `RequestTable`."""

    def run(self) -> Generator[Event]:
        """Step until no request is left; closing the iterator early aborts the active ones."""
        try:
            while self._active:
                yield from self.step()
        finally:
            self.abort_all()

    def step(self, only: Collection[int] | None = None) -> list[Event]:
        """`astep` for a verifier that answers at once, such as the local one."""
        return run_now(self.astep(only))

    async def astep(self, only: Collection[int] | None = None) -> list[Event]:
        """Process new prompts and advance every other request by one round.

        Prompts are processed in parts while others decode; see `LocalVerifier.prompt_tokens`.

        Args:
            only: handles of the requests that take part; the others wait. None: all.
        """
        ended = self._end_empty()
        # In the order of cache rows: adjacent rows are read without a copy.
        requests = sorted(self._active.values(), key=lambda one: one.cache_row)
        if only is not None:
            requests = [request for request in requests if request.handle in only]
        new = [request for request in requests if not request.prefilled]
        running = [request for request in requests if request.prefilled]
        if new and running:
            new = await self._next_prompts(new)
        prefilled = await self._prefill(new) if new else []
        return ended + prefilled + (await self._round(running) if running else [])

    async def _next_prompts(self, requests: Sequence[RequestState]) -> list[RequestState]:
        """Prefill a chunk of the oldest long prompt; returns the oldest requests that fit whole."""
        left = most = getattr(self._verifier, "prompt_tokens", sys.maxsize)
        whole: list[RequestState] = []
        chunked = False
        for request in sorted(requests, key=lambda one: one.handle):
            size = len(request.token_ids) - request.num_verified
            if size <= most:
                left -= size
                whole += [request] if left >= 0 else []
            elif not chunked:
                chunked = True
                await self._prefill_chunk(request, most)
        return sorted(whole, key=lambda one: one.cache_row)

    async def _prefill_chunk(self, request: RequestState, size: int) -> None:
        started_s = time.perf_counter()
        (found,) = await self._verifier.verify([request.prompt_chunk(size)])
        request.num_verified += size
        request.result.num_reused_tokens -= found.num_read_again
        request.result.timing.prefill_s += time.perf_counter() - started_s

    async def _prefill(self, requests: Sequence[RequestState]) -> list[Event]:
        """Process prompts: one target pass for all of them."""
        started_s = time.perf_counter()
        for request in requests:
            self._begin_policy(request)
        prompts = [
            request.verify_request(request.token_ids[request.num_verified :], DraftTree())
            for request in requests
        ]
        verified = await self._verifier.verify(prompts)
        events = self._emit(requests, prompts, verified)
        elapsed_s = time.perf_counter() - started_s
        for request, found in zip(requests, verified, strict=True):
            request.result.timing.prefill_s += elapsed_s
            request.result.num_reused_tokens -= found.num_read_again
        return events

    async def _round(self, requests: Sequence[RequestState]) -> list[Event]:
        """Draft, verify, accept, emit: one target pass for all requests."""
        started_s, times = time.perf_counter(), _shared_times(requests)
        if times is not None:
            times.begin_round(shared=True)
        with self._settings():
            trees = self._draft(requests)
        drafted_s = time.perf_counter()
        asked = [self._verify_request(*pair) for pair in zip(requests, trees, strict=True)]
        verified = await self._verifier.verify(asked)
        events = self._emit(requests, asked, verified)
        verify_s = time.perf_counter() - drafted_s
        for request in requests:
            request.add_seconds(drafted_s - started_s, verify_s, verified)
        if times is not None:
            _record(times, requests, started_s, max(found.encode_s for found in verified))
        return events

    def _draft(self, requests: Sequence[RequestState]) -> list[DraftTree]:
        """A tree for each request; requests that want the same shape are drafted together."""
        trees = [DraftTree()] * len(requests)
        by_shape: dict[Tree, list[int]] = {}
        for i, request in enumerate(requests):
            shape = self._shape(request, len(requests))
            if shape is not None:
                by_shape.setdefault(shape, []).append(i)
        for shape, indices in by_shape.items():
            assert self._proposer is not None, "nothing has a shape without it"
            texts = [
                RequestText(one.cache_row, one.token_ids, one.sampling)
                for one in map(requests.__getitem__, indices)
            ]
            for i, tree in zip(indices, self._proposer.propose(texts, shape), strict=True):
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
            if self._proposer is not None and result.features is not None:
                with self._settings():
                    self._proposer.append_features(request.cache_row, result.features)
            event = request.append_verified(sent, result, self._max_positions)
            if event.stop_reason is not None:
                self._finish(request, event.stop_reason)
            events.append(event)
        return events

    def _end_empty(self) -> list[Event]:
        """End requests for 0 tokens; they need no pass."""
        empty = [one for one in self._active.values() if one.max_new_tokens == 0]
        for request in empty:
            self._finish(request, "max_new_tokens")
        return [Event(request.handle, (), (), "max_new_tokens") for request in empty]


def _shared_times(requests: Sequence[RequestState]) -> ObservedTimes | None:
    """The observed times that the policies of all requests share; None if they share none."""
    found = [None if one.policy is None else one.policy.times for one in requests]
    if found[0] is not None and all(times is found[0] for times in found):
        return found[0]
    for times in found:
        if times is not None:
            times.begin_round(shared=False)
    return None


def _record(
    times: ObservedTimes, requests: Sequence[RequestState], started_s: float, encode_s: float
) -> None:
    """Hand the time of a round of all these requests on, if the costs of all are known."""
    rounds = [one.policy.round_s for one in requests if one.policy is not None]
    if any(plain_s <= 0 for plain_s, _ in rounds):
        return
    plain_s, expected_s = map(sum, zip(*rounds, strict=True))
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
