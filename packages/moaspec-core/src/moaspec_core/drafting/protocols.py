"""The interfaces of proposer and verifier.

A *proposer* drafts tokens, mostly with a drafter. A *verifier* holds the target and accepts drafts;
it may run in this process or on a server. Besides token ids, only `features` pass between them: the
output of the drafter's encoder for the target's activations, computed beside the target.

Legend: N tokens of all requests, L target layers, K one layer's key and value, E hidden size.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.drafting.tree_shapes import DEFAULT_TREE
from moaspec_core.sampling.params import GREEDY, Alternatives, SamplingParams, TextLogprobs

if TYPE_CHECKING:
    from torch import Tensor

Need = Literal["kv", "final_states"]
"""Of each token: keys and values of all target layers, or the states after the final norm."""
Features = Any
"""The output of a proposer's `encode` and input of its `append_features`; opaque to other code."""


@dataclass(frozen=True)
class VerifyRequest:
    """One text's part of a verification.

    Attributes:
        cache_row: row of the caches that holds its keys and values.
        num_verified: tokens of the text whose keys and values stay; 0 processes the text from its
            start.
        new_tokens: tokens to process that are already decided: the prompt, or the bonus
            token.
        tree: drafts below the last of them.
        sampling: how tokens are chosen; with a seed if they are sampled.
        prompt_length: how many of the text's tokens are its prompt.
        encode: whether the proposer wants features now. If not, the features of tokens verified
            meanwhile come with a later request.
        text_length: tokens of the whole text, if `new_tokens` is a chunk of a long prompt that ends
            before it; else 0. Some rotary embeddings depend on it.
        window: most tokens before the end of the text to encode, if features are wanted; 0 for all
            that the drafter needs.
        read_again: whether `new_tokens` were verified before and lost their keys, so that their
            features stay valid and none are made.
        scored: the token that follows each of `new_tokens` in a text whose log-probabilities are
            wanted; the last one may have none. With `sampling.top_logprobs` alternatives.
    """

    cache_row: int
    num_verified: int
    new_tokens: tuple[int, ...]
    tree: DraftTree = field(default_factory=DraftTree)
    sampling: SamplingParams = GREEDY
    prompt_length: int = 0
    encode: bool = True
    text_length: int = 0
    window: int = 0
    read_again: bool = False
    scored: tuple[int, ...] = ()


@dataclass
class VerifyResult:
    """The target's decision for one request; acceptance makes it, and the verifier adds the rest.

    Attributes:
        accepted: nodes of the request's tree that are the target's own choices, in order.
        next_token: the target's choice after the last accepted node (or the last new token).
        features: of all tokens verified since the last features (usually this request's
            `new_tokens` and accepted ones); None if `encode` was false.
        logprobs: if requested, log-probabilities of the accepted tokens and of `next_token` under
            the target's own, unprocessed distribution.
        top_logprobs: if requested, the most probable tokens at the position of each of these.
        encode_s: seconds of encoding in the whole pass.
        pass_s: seconds of the target's pass and head; None if unknown, as across a network or on a
            GPU, which computes asynchronously.
        tree: the drafts that were verified, to which `accepted` belongs, if they are not the
            request's: a verifier across a network may have sent newer drafts while the request
            waited, and a loaded server drops some.
        num_read_again: verified tokens that were processed again, because a target with recurrent
            states cannot go on from everywhere.
        process_s: seconds of processor time of the request's own logits processors, which are its
            owner's work.
        scores: of the request's `scored` tokens.
    """

    accepted: tuple[int, ...]
    next_token: int
    features: Features = None
    logprobs: tuple[float, ...] = ()
    encode_s: float = 0.0
    top_logprobs: tuple[Alternatives, ...] = ()
    tree: DraftTree | None = None
    pass_s: float | None = None
    num_read_again: int = 0
    process_s: float = 0.0
    scores: TextLogprobs | None = None


class Verifier(Protocol):
    """Holds the target. Awaitable, because it may be across a network.

    Attributes:
        prompt_tokens: while requests decode, a step of the engine prefills at most this many tokens
            of short prompts, and as many of a longer one.
        reads_whole: whether a prompt must be read in one pass.
        prompt_window: most tokens before the end of a text that the drafter needs encoded; 0: all.
    """

    prompt_tokens: int = sys.maxsize
    reads_whole: bool = False
    prompt_window: int = 0

    async def verify(self, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
        """Verify all requests and keep the accepted tokens; results are in the same order."""
        ...

    def encoded_range(self, request: VerifyRequest, accepted: int = 0) -> tuple[int, range]:
        """The first token with features after a pass that encodes, and the tokens it encodes.

        Args:
            accepted: how many drafts of the request the pass accepts.
        """
        # By default the tokens of the request are encoded, and no others are known to be.
        stop = request.num_verified + len(request.new_tokens) + accepted
        start = request.num_verified
        if request.window:
            start = max(start, stop - request.window)
        return start, range(start, stop)

    def cut(self, row: int, length: int) -> None:
        """Another text goes on after the first `length` tokens of a row."""
        del row, length  # by default it overwrites what follows them

    def close(self, row: int) -> None:
        """Drop all data of a row."""
        del row  # by default the next request in it overwrites them


@dataclass(frozen=True)
class RequestText:
    """One text to draft for; its last token has no activations yet.

    Attributes:
        cache_row: row of the caches that holds its keys and values.
        token_ids: prompt and output; a draft below the last of them has position `len(token_ids)`.
        sampling: its settings, so that drafts can use the same noise as the target.
    """

    cache_row: int
    token_ids: Sequence[int]
    sampling: SamplingParams = GREEDY


PROPOSER_METHODS = ("needs", "encode", "append_features", "propose", "rollback", "close")
"""The attributes that make an object a `Proposer`."""


class Proposer(Protocol):
    """Proposes tokens. Subclasses inherit defaults for what needs no features and keeps no state.

    Attributes:
        needs: the kind of target activations that `encode` takes.
    """

    needs: frozenset[Need] = frozenset()

    def encode(
        self, _activations_1N: Tensor, _position_ids_1N: Tensor, counts: Sequence[int]
    ) -> list[Features]:
        """Encode newly verified tokens for `append_features`; runs beside the target.

        Args:
            _activations_1N: of N tokens, those of several requests one after another: keys and
                values (1, N, L, K) for a proposer that needs "kv", final states (1, N, E) for
                "final_states".
            _position_ids_1N: their positions.
            counts: how many of the N belong to each request.

        Returns:
            One `Features` per count; by default None, as there are no features.
        """
        return [None] * len(counts)

    def append_features(self, row: int, features: Features) -> None:
        """Store features of newly verified tokens, which follow the earlier ones."""
        del row, features  # by default there are none

    def propose(self, requests: Sequence[RequestText], shape: Tree) -> list[DraftTree]:
        """Draft below the last token of every text."""
        ...

    def rollback(self, row: int, length: int) -> None:
        """Keep only the first `length` verified tokens of a row: the text continues differently."""
        del row, length  # by default there is no state

    def close(self, row: int) -> None:
        """Drop all data of a row."""
        del row  # by default there is none


class CachingProposer(Proposer):
    """A `Proposer` with caches of its own, in the process of a target.

    Attributes:
        prompt_window: most tokens before the end of a text that it needs encoded; 0: all.
        usual_shape: what "auto" drafts where costs are not known.
    """

    prompt_window: int = 0
    usual_shape: Tree = DEFAULT_TREE

    @property
    def caches(self) -> list[Any]:
        """Its `KVCache`s, one row for each row of the target's."""
        return []

    def encode_and_append(self, cache: Any, row: int, tokens: range) -> bool:
        """Encode newly verified tokens of one row and store their features, in one call.

        Args:
            cache: the target's `KVCache`.
            tokens: positions in the row.

        Returns:
            False if nothing was done, so that `encode` and `append_features` are called.
        """
        del cache, row, tokens  # by default there is no such call
        return False

    @abstractmethod
    def release(self) -> None:
        """Free the caches' memory; no row may be in use."""


class TextProposer(Proposer):
    """A `Proposer` whose drafts depend only on the tokens of the text."""

    @abstractmethod
    def draft(self, token_ids: Sequence[int], shape: Tree) -> DraftTree:
        """Draft below the last of these tokens; at most `shape.total_tokens` nodes."""

    def propose(self, requests: Sequence[RequestText], shape: Tree) -> list[DraftTree]:
        return [self.draft(request.token_ids, shape) for request in requests]
