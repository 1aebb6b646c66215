"""The interfaces of drafter and verifier.

A *drafter* proposes tokens. A *verifier* holds the target and accepts them; it may run in this
process or on a server. Besides token ids, only `features` pass between them: the output of the
drafter's encoder for the target's activations, computed beside the target.

Legend: B batch, T tokens, L target layers, K one layer's key and value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from moaspec.drafting.draft_tree import DraftTree, Tree
from moaspec.sampling.params import GREEDY, Alternatives, SamplingParams

Need = Literal["kv", "hidden"]
Features = Any
"""The output of a drafter's `encode`, and the input of its `observe`; opaque to other code."""


@dataclass(frozen=True)
class VerifyRequest:
    """One text's part of a verification.

    Attributes:
        row: of the caches.
        num_verified: tokens of the text whose keys and values stay; 0 processes the text from its
            start.
        new_tokens: tokens to process that are already decided: the prompt, or the last accepted
            token.
        tree: drafts below the last of them.
        sampling: how tokens are chosen; with a seed if they are sampled.
        prompt_length: how many of the text's tokens are its prompt.
        encode: whether the drafter wants features now. If not, the features of all tokens that are
            verified meanwhile come with a later request.
        text_length: tokens of the whole text, if `new_tokens` is a chunk of a long prompt that ends
            before it; else 0. Some rotary embeddings depend on it.
    """

    row: int
    num_verified: int
    new_tokens: tuple[int, ...]
    tree: DraftTree = field(default_factory=DraftTree)
    sampling: SamplingParams = GREEDY
    prompt_length: int = 0
    encode: bool = True
    text_length: int = 0


@dataclass(frozen=True)
class VerifyResult:
    """The target's decision for one request.

    Attributes:
        accepted: nodes of the request's tree that are the target's own choices, in order.
        next_token: the target's choice after the last accepted node (or the last new token).
        features: of all tokens verified since the last features (usually this request's
            `new_tokens` and accepted ones); None if the request wanted none.
        logprobs: if requested, log-probabilities of the accepted tokens and of `next_token` under
            the target's own, unprocessed distribution.
        top_logprobs: if requested, the most probable tokens at the position of each of these.
        encode_s: seconds of encoding in the whole pass.
        pass_s: seconds of the target's pass and head; None if unknown, as across a network or on a
            GPU, which computes asynchronously.
        tree: the tree of `accepted`, if it is not the request's: a verifier across a network may
            have sent newer drafts while the request waited.
    """

    accepted: tuple[int, ...]
    next_token: int
    features: Features = None
    logprobs: tuple[float, ...] = ()
    encode_s: float = 0.0
    top_logprobs: tuple[Alternatives, ...] = ()
    tree: DraftTree | None = None
    pass_s: float | None = None


class Verifier(Protocol):
    """Holds the target. Awaitable, because it may be across a network."""

    async def verify(self, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
        """Verify all requests and keep the accepted tokens; results are in the same order."""
        ...

    def close(self, row: int) -> None:
        """Drop all data of a row."""
        ...


@dataclass(frozen=True)
class RowText:
    """One text to draft for; its last token has no activations yet.

    Attributes:
        row: of the caches.
        token_ids: prompt and output; a draft below the last of them has position `len(token_ids)`.
        sampling: its settings, so that drafts can use the same noise as the target.
    """

    row: int
    token_ids: Sequence[int]
    sampling: SamplingParams = GREEDY


DRAFTER_METHODS = ("needs", "encode", "observe", "propose", "rollback", "close")
"""The attributes that make an object a `Drafter`."""


class Drafter(Protocol):
    """Proposes tokens. `needs` names the kind of target activations that `encode` takes."""

    needs: frozenset[Need]

    def encode(
        self, activations_1N: Tensor, position_ids_1N: Tensor, counts: Sequence[int]
    ) -> list[Features]:
        """Encode newly verified tokens for `observe`; runs beside the target.

        Args:
            activations_1N: of N tokens, those of several rows one after another: keys and values
                (1, N, L, K) for a drafter that needs "kv", final states (1, N, E) for "hidden".
            position_ids_1N: their positions.
            counts: how many of the N belong to each row.

        Returns:
            One `Features` per count.
        """
        ...

    def observe(self, row: int, features: Features) -> None:
        """Store features of newly verified tokens, which follow the earlier ones."""
        ...

    def propose(self, rows: Sequence[RowText], shape: Tree) -> list[DraftTree]:
        """Draft below the last token of every text."""
        ...

    def rollback(self, row: int, length: int) -> None:
        """Keep only the first `length` verified tokens of a row: the text continues differently."""
        ...

    def close(self, row: int) -> None:
        """Drop all data of a row."""
        ...
