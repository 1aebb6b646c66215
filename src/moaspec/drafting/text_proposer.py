"""Base class of drafters without a network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from moaspec.drafting.draft_tree import DraftTree, Tree
from moaspec.drafting.protocols import Features, Need, RowText


class TextProposer(ABC):
    """A `Drafter` whose drafts depend only on the tokens of the text."""

    needs: frozenset[Need] = frozenset()

    @abstractmethod
    def draft(self, token_ids: Sequence[int], shape: Tree) -> DraftTree:
        """Draft below the last of these tokens; at most `shape.total_tokens` nodes."""

    def propose(self, rows: Sequence[RowText], shape: Tree) -> list[DraftTree]:
        """Draft for every row."""
        return [self.draft(row.token_ids, shape) for row in rows]

    def encode(
        self, _kv_1NLK: Tensor, _position_ids_1N: Tensor, counts: Sequence[int]
    ) -> list[Features]:
        """One None per count: there are no features."""
        return [None] * len(counts)

    def observe(self, row: int, features: Features) -> None:  # noqa: B027 - nothing to take in
        """Does nothing: there are no features."""

    def rollback(self, row: int, length: int) -> None:  # noqa: B027 - nothing to forget
        """Does nothing: there is no state."""

    def close(self, row: int) -> None:  # noqa: B027 - nothing to forget
        """Does nothing: there is no state."""
