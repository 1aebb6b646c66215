"""A proposer that knows the texts and drafts them with a set acceptance."""

from collections.abc import Sequence

import numpy as np

from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.drafting.protocols import TextProposer
from moaspec_core.errors import InputError
from moaspec_core.sampling.philox import noise_bits


class OracleProposer(TextProposer):
    """Proposes known texts; a draft at each depth is right with a set probability.

    It measures the speed-up that a drafter of this acceptance would bring on this machine. Whether
    a draft is right depends on seed, position and depth only.

    Args:
        texts: whole texts, prompts included. A request gets drafts from the first text that begins
            with its tokens.
        agreement: probability that a draft is right, at depth 1, 2, ... (the last one holds for
            deeper ones too), or one number for all depths.
        seed: of the draws, 0 .. 2^63 - 1.

    Raises:
        InputError: no agreement, or one outside 0..1.
    """

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        *,
        agreement: float | Sequence[float] = 1.0,
        seed: int = 0,
    ) -> None:
        by_depth = (agreement,) if isinstance(agreement, (int, float)) else tuple(agreement)
        if not by_depth or not all(0.0 <= share <= 1.0 for share in by_depth):
            raise InputError(f"agreement must be within 0..1, got {agreement!r}.")
        self._texts = [list(text) for text in texts]
        self._agreement, self._seed = by_depth, seed

    def draft(self, token_ids: Sequence[int], shape: Tree) -> DraftTree:
        """The known continuation as a path; siblings that are wrong come before its nodes."""
        right = self._continuation(list(token_ids), shape.depth)
        spare = shape.total_tokens - len(right)
        tokens: list[int] = []
        parents: list[int] = []
        node = -1
        for token, hit in zip(right, self._hits(len(token_ids), len(right)), strict=True):
            siblings = min(shape.breadth - 1, spare)
            spare -= siblings
            tokens += [_wrong(token, 2 + number) for number in range(siblings)]
            tokens.append(token if hit else _wrong(token, 1))
            parents += [node] * (siblings + 1)
            node = len(tokens) - 1
        return DraftTree(tuple(tokens), tuple(parents))

    def _continuation(self, text: list[int], length: int) -> list[int]:
        start = len(text)
        for known in self._texts:
            if known[:start] == text:
                return known[start : start + length]
        return []

    def _hits(self, position: int, depth: int) -> list[bool]:
        """Whether the drafts at depth 1, 2, ... below this position are right."""
        shares = [self._agreement[min(i, len(self._agreement) - 1)] for i in range(depth)]
        level = np.arange(depth)
        drawn = noise_bits(self._seed, 0, position + level, level) * 2.0**-53
        return [one < share for one, share in zip(drawn.tolist(), shares, strict=True)]


def _wrong(token: int, number: int) -> int:
    """The number-th token that is not this one; small, so that every vocabulary has it."""
    return token - number if token >= number else token + number
