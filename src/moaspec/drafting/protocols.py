"""The two roles in a round, so that local, remote and foreign ones are interchangeable.

A *drafter* proposes; a *verifier* holds the target and decides. The only thing that crosses between
them besides token ids are `features`: what the drafter's own encoder made of the target's
activations, computed beside the target.

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
"""Made by a drafter's `encode`, understood by its `observe`, opaque to everything between."""


@dataclass(frozen=True)
class VerifyRequest:
    """One row's part of a verification.

    Attributes:
        row: which row.
        num_verified: tokens of the row that are already verified and stay; 0 reads the row anew.
        new_tokens: tokens to process that are already decided: the prompt, or the last accepted
            token.
        tree: drafts that hang below the last known token.
        sampling: how the row's tokens are chosen; with a seed where noise takes part.
        prompt_length: how many of the row's tokens are its prompt.
        encode: whether the drafter wants features now. Where it does not, a later request of the
            row brings those of all tokens verified meanwhile.
        text_length: tokens of the whole text where `new_tokens` ends before it, because a long
            prompt is processed in pieces; 0 where it does not. Some rotary embeddings depend on
            it.
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
    """What the target decided.

    Attributes:
        accepted: nodes of the request's tree that are the target's own choices, in order.
        next_token: the target's choice after the last accepted node (or the last known token).
        features: of all tokens verified since the row's last features (usually this request's
            `new_tokens` and accepted ones); None where the request wanted none.
        logprobs: where the row asks for them, log-probabilities of the accepted tokens and of
            `next_token` under the target's own, unprocessed distribution.
        top_logprobs: where it asks for them, the most probable tokens in place of each of these.
        encode_s: seconds that the features of the whole pass took.
        pass_s: seconds that the target's pass and head took; None where that is not known, as
            across a network, or on a GPU, which computes while the CPU goes on.
        tree: what `accepted` refers to where it is not the request's tree: a verifier across a
            network may have sent what was drafted while the request waited.
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
        """Decide all requests and keep what was accepted; answers in the same order."""
        ...

    def close(self, row: int) -> None:
        """Drop all data of a row."""
        ...


@dataclass(frozen=True)
class RowText:
    """A row as a drafter sees it: all its tokens; the last one has no activations yet.

    Attributes:
        row: which row.
        token_ids: prompt and output; a draft below the last of them has position `len(token_ids)`.
        sampling: the row's settings, so that drafts can use the noise that the target will use.
    """

    row: int
    token_ids: Sequence[int]
    sampling: SamplingParams = GREEDY


DRAFTER_METHODS = ("needs", "encode", "observe", "propose", "rollback", "close")
"""What an object must have to be a `Drafter`."""


class Drafter(Protocol):
    """Proposes tokens. `needs` says which of the target's activations `encode` wants: one kind."""

    needs: frozenset[Need]

    def encode(
        self, activations_1N: Tensor, position_ids_1N: Tensor, counts: Sequence[int]
    ) -> list[Features]:
        """Runs beside the target: what `observe` needs to know of newly verified tokens.

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
        """Take in features of newly verified tokens, which follow those seen before."""
        ...

    def propose(self, rows: Sequence[RowText], shape: Tree) -> list[DraftTree]:
        """Draft for every row, below its last token."""
        ...

    def rollback(self, row: int, length: int) -> None:
        """Forget all but a row's first `length` verified tokens: its text goes on otherwise."""
        ...

    def close(self, row: int) -> None:
        """Drop all data of a row."""
        ...
