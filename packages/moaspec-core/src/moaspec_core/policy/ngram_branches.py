"""N-gram branches: continuations copied from a request's own text, verified beside its drafts."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.drafting.ngram_proposer import NgramIndex
from moaspec_core.drafting.tree_shapes import PricedTree, merged, nodes_along, selected
from moaspec_core.policy.cost_model import FadingRate, KnownCosts

SIZES = (4, 3, 2)
"""Lengths of the n-grams that are looked up, longest first. A single token predicts too little."""

COPY_RATES = ((12, 0.93, 0.92), (8, 0.83, 0.86), (5, 0.72, 0.83), (3, 0.55, 0.79), (2, 0.30, 0.74))
"""By length of the text's end that occurs earlier: the probability that the next token is that of
the earlier place, as far as it does not depend on the drafter, and the same for each token after a
copied one. Counted on 100 answers of SmolLM2-135M-Instruct."""

PRIOR_LOOKUPS = 8.0
"""Lookups that these rates count for beside those of the request."""

MAX_RATE = 0.97

MAX_COPIED = 16
"""Tokens of a path at most: text that is repeated goes on for longer than drafts are right."""


class NgramBranches:
    """The n-gram branches of one request.

    Args:
        shape: of the branches, or costs, by which one path is verified as far as it pays.

    Source: prompt lookup decoding (Saxena, 2023). That longer matches are worth longer copies is an
    idea of SuffixDecoding, arXiv 2411.04975.
    """

    def __init__(self, shape: Tree | KnownCosts) -> None:
        self._shape: Tree | None = None  # of this round
        self._given, self._index = shape, NgramIndex(SIZES)
        self._paths: list[tuple[int, ...]] = []
        self._rates = (0.0, 0.0)  # of the path's first token, and of each further one
        self._guess: tuple[int, int, float] | None = None  # place, token, its rate by the table
        self._hit_rate = FadingRate(1.0, PRIOR_LOOKUPS)  # right guesses over those expected

    def drop_index(self) -> None:
        """Free the index; the next lookup makes it again."""
        self._index = NgramIndex(SIZES)

    def look_up(self, token_ids: Sequence[int], num_requests: int, depth: int) -> float:
        """Find what followed the text's end where it occurs earlier.

        Args:
            num_requests: that take part in the round; with costs only a request alone copies.
            depth: most tokens to copy.

        Returns:
            Tokens that the path promises beyond the price of verifying it alone, 0.0 without costs.
        """
        self._paths, self._shape = [], None
        length, shape = len(token_ids), self._given
        if depth < 1:
            return 0.0
        if isinstance(shape, KnownCosts):
            if num_requests > 1:  # a path of one request gives the others pads
                return 0.0
            shape = shape.at(length, 1).tree
        self._shape = limited = shape.limited(depth)
        if limited is None:
            return 0.0
        self._index.extend(token_ids)
        if not isinstance(limited, PricedTree):
            self._paths = self._index.paths(limited)
            return 0.0
        self._count(token_ids)
        size, path = self._index.longest(min(depth, MAX_COPIED), COPY_RATES[0][0])
        if not path:
            return 0.0
        first, later = next((first, more) for least, first, more in COPY_RATES if size >= least)
        self._paths, self._guess = [path], (length, path[0], first)
        self._rates = min(MAX_RATE, first * self._hit_rate.value), later
        promised = accumulate(self._rates[0] * later**i for i in range(len(path)))
        return max(
            0.0, *(sum_ - price for sum_, price in zip(promised, limited.prices, strict=False))
        )

    def _count(self, token_ids: Sequence[int]) -> None:
        """Compare the last guess with the text."""
        if self._guess is not None and self._guess[0] < len(token_ids):
            place, token, rate = self._guess
            self._hit_rate.count(token_ids[place] == token, rate)
            self._guess = None

    def joined(self, tree: DraftTree) -> DraftTree:
        """The drafts and the branches; where both have probabilities, as many nodes as pay.

        The probability of a node is that of a mixture: with the path's rate the text is copied,
        otherwise it goes on as the drafter expects.
        """
        shape = self._shape
        if shape is None or not self._paths:
            return tree
        whole = merged(self._paths, len(tree.tokens) + shape.total_tokens, tree)
        if not isinstance(shape, PricedTree) or len(tree.log_p) < len(tree.tokens):
            return whole
        path = nodes_along(self._paths[0], whole)
        first, later = self._rates
        rates = dict.fromkeys(path[:-1], later) | {-1: first}
        copied, p = set(path), list[float]()
        for node, parent in enumerate(whole.parents):
            drafted = 0.0
            if node < len(tree.tokens):
                drafted = math.exp(tree.log_p[node] - (tree.log_p[parent] if parent >= 0 else 0.0))
            rate = rates.get(parent, 0.0)
            share = min(1.0, rate * (node in copied) + (1.0 - rate) * drafted)
            p.append(max(1e-30, share * (p[parent] if parent >= 0 else 1.0)))
        order = sorted(range(len(p)), key=lambda node: -p[node])  # stable: parents come first
        log_p = [math.log(rate) for rate in p]
        kept = bytearray(len(p))
        for node in order[: shape.kept([log_p[node] for node in order])]:
            kept[node] = 1
        return selected(replace(whole, log_p=tuple(log_p)), bytes(kept))
