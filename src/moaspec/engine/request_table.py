"""The requests of an engine: how they join, end and leave."""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from moaspec.drafting.draft_tree import DraftTree, Tree
from moaspec.drafting.other_proposers.ngram_branches import NgramBranches
from moaspec.drafting.policy.cost_model import KnownCosts
from moaspec.drafting.protocols import Proposer, Verifier
from moaspec.drafting.tree_shapes import DEFAULT_TREE
from moaspec.engine.position_rules import PositionRules, TargetFacts
from moaspec.engine.request_state import RequestState, Shape
from moaspec.engine.result import GenerationResult, StopReason
from moaspec.errors import ContextError, InputError, PromptError
from moaspec.sampling.params import GREEDY, SamplingParams
from moaspec.sampling.stop_strings import StopStrings, stop_strings
from moaspec.sampling.token_ids import as_integer, as_token_ids, common_length

MAX_ENDED_RESULTS = 256
"""Ended requests whose results stay available; without a limit they would fill the memory."""


class RequestTable:
    """Requests by handle: active ones, kept ones, and results of ended ones.

    Args:
        proposer: drafts tokens; None is plain decoding.
        target: gives vocabulary size, context length, the lengths at which cached keys become
            invalid (rotary switches), and the tokenizer that stop strings need.
        max_positions: the longest text, where it is shorter than the target's context.
    """

    def __init__(
        self,
        verifier: Verifier,
        proposer: Proposer | None = None,
        *,
        target: TargetFacts,
        max_positions: int | None = None,
    ) -> None:
        self._verifier, self._proposer = verifier, proposer
        self._settings = torch_settings()
        rules = PositionRules.of(target, max_positions)
        self._max_positions = rules.max_positions
        self._rules = None if rules.are_plain else rules
        self._vocab_size, self._tokenizer = target.vocab_size, target.tokenizer
        self._active: dict[int, RequestState] = {}
        self._kept: dict[int, RequestState] = {}
        self._ended: dict[int, GenerationResult] = {}
        self._next_handle = 0

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
            window=getattr(self._verifier, "prompt_window", 0),
        )
        if old is not None:
            self._take_over(request, old)
        self._next_handle += 1
        self._active[request.handle] = request
        return request.handle

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
        if self._proposer is not None:
            self._proposer.rollback(request.cache_row, request.num_verified)
        del self._kept[old.handle]

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

    def _get_kept(self, handle: int) -> RequestState:
        if handle not in self._kept:
            raise InputError(
                f"Request {handle} is not kept: add it with keep=True and let it end first."
            )
        return self._kept[handle]

    def _free_cache_row(self) -> int:
        """The first cache row that neither an active nor a kept request uses."""
        used = {one.cache_row for one in (*self._active.values(), *self._kept.values())}
        return next(i for i in range(len(used) + 1) if i not in used)

    def _begin_policy(self, request: RequestState) -> None:
        """Tell a request's policy how many tokens the next pass would encode."""
        policy, unread = request.policy, request.token_ids[request.num_verified :]
        if policy is None:
            return
        asked = request.verify_request(unread, DraftTree())
        num_unread = min(len(unread), asked.window or len(unread))
        if hasattr(self._verifier, "encoded_range"):  # as `LocalVerifier` has
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


def torch_settings() -> Callable[[], AbstractContextManager[None]]:
    """The block that proposers run in: `plain_torch`, or nothing in a process without PyTorch."""
    if "torch" not in sys.modules:
        return nullcontext
    from moaspec.target.target import plain_torch

    return plain_torch


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
