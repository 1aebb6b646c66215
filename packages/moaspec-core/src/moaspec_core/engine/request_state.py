"""The state of one request, what its generation returns, and what streaming yields."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Literal

from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.drafting.protocols import VerifyRequest, VerifyResult
from moaspec_core.drafting.tree_shapes import without
from moaspec_core.policy.ngram_branches import NgramBranches
from moaspec_core.policy.policies import DraftPolicy
from moaspec_core.sampling.params import GREEDY, Alternatives, SamplingParams, TextLogprobs
from moaspec_core.sampling.stop_strings import StopStrings

Shape = Tree | DraftPolicy | None
"""What is drafted for a request: a fixed shape, one chosen every round, or nothing."""

Source = Literal["draft", "target", "copy"]
"""Who proposed a token: the drafter, the target itself (the bonus token), or the text itself, by an
n-gram branch."""

StopReason = Literal["stop_token", "stop_string", "max_new_tokens", "context", "aborted"]


@dataclass
class Timing:
    """Wall-clock seconds of the passes of a request.

    Attributes:
        prefill_s: the prompt's pass, with the drafter's encoding of it.
        draft_s: drafting.
        verify_s: the target's passes and head in rounds; where they cannot be told apart (across a
            network, on a GPU), verification as a whole.
        encode_s: the drafter's encoding of what rounds verified.
        total_s: from joining the engine to the last token.
    """

    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    encode_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True)
class Event:
    """Verified tokens of one request.

    Attributes:
        handle: which request.
        token_ids: in order; never taken back.
        sources: who proposed each.
        stop_reason: set on the last event of a request.
        tree: the drafts of the round; empty for the prompt's pass and for plain rounds.
        accepted: the accepted nodes of the tree, in order.
        logprobs: of these tokens; see `GenerationResult`.
        top_logprobs: of these tokens; see `GenerationResult`.
        scores: of the prompt, with the first tokens, if they were asked for.
    """

    handle: int
    token_ids: tuple[int, ...]
    sources: tuple[Source, ...]
    stop_reason: StopReason | None = None
    tree: DraftTree = field(default_factory=DraftTree)
    accepted: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[Alternatives, ...] = ()
    scores: TextLogprobs | None = None


@dataclass
class GenerationResult:
    """Generated ids, and the counts and times of their rounds.

    Attributes:
        token_ids: generated tokens, including a stop token and the token that completes a stop
            string.
        sources: who proposed each of them.
        accept_lengths: tokens emitted by each round, with the bonus token. The prefill's first
            token belongs to no round, and the last round counts only tokens up to the end.
        copied_lengths: how many of these each round took from n-gram branches.
        drafted_depths: levels drafted by the drafter in each round.
        num_drafted: the drafter's verified tokens over all rounds.
        stop_reason: why it ended.
        stop_string: the stop string that ended it; the text contains it, and all characters of its
            last token.
        logprobs: if requested, the log-probability of each of `token_ids` under the target's own
            distribution, before temperature and processors.
        top_logprobs: if requested, the most probable tokens at the position of each of them.
        seed: the seed of sampling, given or drawn; None for greedy decoding without a seed.
        num_reused_tokens: tokens of the prompt with cached keys from an earlier turn.
        timing: seconds by part.
    """

    token_ids: list[int] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)
    copied_lengths: list[int] = field(default_factory=list)
    drafted_depths: list[int] = field(default_factory=list)
    num_drafted: int = 0
    stop_reason: StopReason | None = None
    stop_string: str | None = None
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Alternatives] = field(default_factory=list)
    seed: int | None = None
    num_reused_tokens: int = 0
    timing: Timing = field(default_factory=Timing)

    @property
    def num_rounds(self) -> int:
        """Target verifications, the prefill not counted."""
        return len(self.accept_lengths)

    @property
    def tau(self) -> float | None:
        """Mean tokens per round; None when there was no round. Plain decoding has 1.0."""
        return sum(self.accept_lengths) / self.num_rounds if self.num_rounds else None

    @property
    def num_copied(self) -> int:
        """Tokens from n-gram branches; `tau` counts them."""
        return sum(self.copied_lengths)

    @property
    def tau_without_copies(self) -> float | None:
        """`tau` without the tokens from n-gram branches."""
        emitted = sum(self.accept_lengths) - self.num_copied
        return emitted / self.num_rounds if self.num_rounds else None

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of accepted drafts at depth 1, 2, ..., over the rounds that drafted as deep."""
        return acceptance_by_depth([self])


@dataclass
class RequestState:
    """Host-side state of one request."""

    handle: int
    cache_row: int
    token_ids: list[int]  # prompt and output
    prompt_length: int  # how many of them are the prompt
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    stop: StopStrings | None
    shape: Shape  # of the proposer's drafts
    # Of the n-gram branches ("free branches"), continuations copied from the text and verified
    # beside the drafts.
    branches: NgramBranches | None
    sampling: SamplingParams
    keep: bool  # whether the cache row is kept when the request ends
    owner: str = ""  # whose turns it takes, see `Scheduler`
    priority: int = 0  # among its owner's requests the lowest comes first
    window: int = 0  # the drafter's, see `VerifyRequest`
    # Of the prompt so far, if its log-probabilities are wanted, which are then all computed here.
    scores: TextLogprobs | None = None
    prefilled: bool = False  # whether the target has processed the prompt
    num_verified: int = 0  # tokens whose keys and values the verifier holds; not yet the newest one
    result: GenerationResult = field(default_factory=GenerationResult)
    started_s: float = field(default_factory=time.perf_counter)
    # Chooses the shape every round; None if the shape is fixed.
    policy: DraftPolicy | None = field(init=False)

    def __post_init__(self) -> None:
        self.result.seed = self.sampling.seed
        self.policy = None if isinstance(self.shape, Tree) else self.shape

    @property
    def num_unread(self) -> int:
        """Tokens to read before it decodes: of the prompt, or of a text that was set back."""
        unread = len(self.token_ids) - self.num_verified
        return 0 if self.prefilled and unread == 1 else unread

    @property
    def num_remaining(self) -> int:
        return self.max_new_tokens - len(self.result.token_ids)

    def text_chunk(self, size: int) -> VerifyRequest:
        """A request for the text's next `size` unread tokens; more of it follows."""
        tokens = self.token_ids[self.num_verified : self.num_verified + size]
        chunk = self.verify_request(tokens, DraftTree())
        # Alternatives are wanted of the prompt's tokens only.
        sampling = GREEDY if self.scores is None else self.sampling
        return replace(chunk, sampling=sampling, encode=False, text_length=len(self.token_ids))

    def record_scores(self, request: VerifyRequest, verified: VerifyResult) -> None:
        """Keep the prompt's log-probabilities; some are computed again after a set-back."""
        if self.scores is None or verified.scores is None:
            return
        first, found = request.num_verified, verified.scores
        self.scores = TextLogprobs(
            (*self.scores.logprobs[:first], *found.logprobs),
            (*self.scores.top_logprobs[:first], *found.top_logprobs),
        )

    def verify_request(self, new_tokens: Sequence[int], tree: DraftTree) -> VerifyRequest:
        """The request to the verifier for the next pass."""
        scored: Sequence[int] = ()
        if self.scores is not None and not self.prefilled:
            first = self.num_verified + 1
            scored = self.token_ids[first : first + len(new_tokens)]
        return VerifyRequest(
            self.cache_row,
            self.num_verified,
            tuple(new_tokens),
            tree,
            self.sampling,
            self.prompt_length,
            self.wants_features,
            window=min((self.policy and self.policy.window) or self.window, self.window),
            scored=tuple(scored),
        )

    @property
    def wants_features(self) -> bool:
        """Whether the next round may draft, so that tokens verified now must be encoded."""
        return isinstance(self.shape, Tree) or (
            self.policy is not None and self.policy.wants_features
        )

    def without_endings(self, tree: DraftTree) -> DraftTree:
        """The drafts without nodes that would end the request, and without their descendants.

        Plain decoding chooses no token after the end, and a custom logits processor may fail there.
        This costs no round: the target itself chooses the last token in the same round.
        """
        ends = {node for node, token in enumerate(tree.tokens) if token in self.stop_token_ids}
        if self.stop:
            ends |= self.stop.completing(tree.tokens, tree.parents)
        return without(tree, ends) if ends else tree

    def append_verified(
        self, request: VerifyRequest, verified: VerifyResult, max_positions: int
    ) -> Event:
        """Append verified tokens up to the request's end, and report them."""
        tree = request.tree if verified.tree is None else verified.tree
        first, scores = not self.prefilled, None
        if first:
            self.record_scores(request, verified)
            scores = self.scores
        accepted = [tree.tokens[node] for node in verified.accepted]
        tokens, reason = self._until_end([*accepted, verified.next_token], max_positions)
        sources = _sources(tree, verified.accepted)[: len(tokens)]
        if not first:
            self._count_round(tree, verified.accepted, sources)
        self.prefilled = True
        self.num_verified = request.num_verified + len(request.new_tokens) + len(accepted)
        self.token_ids += tokens
        logprobs = verified.logprobs[: len(tokens)]
        top_logprobs = verified.top_logprobs[: len(tokens)]
        self.result.token_ids += tokens
        self.result.sources += sources
        self.result.logprobs += logprobs
        self.result.top_logprobs += top_logprobs
        return Event(
            self.handle,
            tuple(tokens),
            tuple(sources),
            reason,
            tree=tree,
            accepted=verified.accepted,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            scores=scores,
        )

    def _count_round(
        self, tree: DraftTree, accepted: Sequence[int], sources: Sequence[Source]
    ) -> None:
        """Record a round in the result and report it to the draft policies."""
        num_drafted = len(tree.tokens) - tree.num_copied
        self.result.accept_lengths.append(len(sources))
        self.result.copied_lengths.append(sources.count("copy"))
        self.result.drafted_depths.append(max(tree.depths[:num_drafted], default=0))
        self.result.num_drafted += num_drafted
        if self.policy is not None:
            self.policy.record_round(tree, accepted)

    def add_seconds(
        self, draft_s: float, verify_s: float, verified: Sequence[VerifyResult]
    ) -> None:
        """Add the seconds of one round: drafting, and verification with encoding."""
        timing, pass_s = self.result.timing, verified[0].pass_s
        encode_s = max(result.encode_s for result in verified)
        timing.draft_s += draft_s
        timing.verify_s += verify_s - encode_s if pass_s is None else pass_s
        timing.encode_s += encode_s

    def _until_end(
        self, tokens: Sequence[int], max_positions: int
    ) -> tuple[list[int], StopReason | None]:
        """Tokens up to and including the first that ends the request, and why it ends."""
        room = max_positions - len(self.token_ids)
        for i, token in enumerate(tokens, start=1):
            if token in self.stop_token_ids:
                return list(tokens[:i]), "stop_token"
            if self.stop and (stop_string := self.stop.push(token)):
                self.result.stop_string = stop_string
                return list(tokens[:i]), "stop_string"
            if i >= self.num_remaining:
                return list(tokens[:i]), "max_new_tokens"
            if i == room:
                return list(tokens[:i]), "context"
        return list(tokens), None


def _sources(tree: DraftTree, accepted: Sequence[int]) -> list[Source]:
    """Who proposed each of the accepted tokens, and the target for the bonus token."""
    num_drafted = len(tree.tokens) - tree.num_copied
    sources: list[Source] = ["draft" if node < num_drafted else "copy" for node in accepted]
    return [*sources, "target"]


def acceptance_by_depth(results: list[GenerationResult]) -> list[float]:
    """Acceptance at depth 1, 2, ... over the rounds of several results."""
    hits: list[int] = []
    rounds: list[int] = []
    for result in results:
        lengths = zip(result.accept_lengths, result.copied_lengths, strict=True)
        for (emitted, copied), depth in zip(lengths, result.drafted_depths, strict=True):
            hits = _add(hits, min(emitted - 1 - copied, depth))
            rounds = _add(rounds, depth)
    return [hit / total for hit, total in zip_longest(hits, rounds, fillvalue=0)]


def _add(counts: list[int], depth: int) -> list[int]:
    """Count one at each of the first `depth` places."""
    return [a + b for a, b in zip_longest(counts, [1] * depth, fillvalue=0)]
