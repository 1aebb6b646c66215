"""What a generation returns, and what streaming yields."""

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal

from moaspec.drafting.draft_tree import DraftTree
from moaspec.sampling.params import Alternatives

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
    """

    handle: int
    token_ids: tuple[int, ...]
    sources: tuple[Source, ...]
    stop_reason: StopReason | None = None
    tree: DraftTree = field(default_factory=DraftTree)
    accepted: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[Alternatives, ...] = ()


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
