"""What a round costs on this machine, what it should bring, and the shape that pays most.

Everything here is arithmetic on stored measurements and on counts. No clock is read, so the same
request makes the same decisions every time.

Legend: D depths, R ranks among siblings (0 is the drafter's favourite).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from moaspec.decode.tree import DraftTree, PricedTree, Tree
from moaspec.errors import InputError

Floats = npt.NDArray[np.float64]

MAX_DEPTH, MAX_RANK = 8, 8
BREADTHS = (1, 2, 4, 8)
TOTALS = np.array([1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 62])
"""Sizes that are considered; the paper's largest tree, `Tree(6, 8, 62)`, is the last of each."""

MOST_DRAFTS = 62
"""Drafts of a round at most, as many as the paper's tree has."""

GAIN = 1.15
"""Tokens that a row is taken to write in the time that plain decoding takes for one: what time is
worth. Simulated on 40 answers, 1.0 and 1.3 gave the same speed."""

CONTEXT_STEP = 512
"""Prices are those after a multiple of so many tokens, so that rows of like length share a tree and
are drafted for together."""

PRIOR = ((0.28, 0.10, 0.05, 0.03, 0.02, 0.02, 0.01, 0.01),)
"""P(the target chooses the draft of rank 0, 1, ...), given that it chose the path to it, for a
drafter that records nothing else: what the first bundled drafter for SmolLM2-135M-Instruct
reached on the package's prompts. Depths beyond the last line repeat it."""

PRIOR_ROUNDS = 4.0
"""Rounds that the prior counts for."""

MEMORY = 0.98
"""What an observation is worth one round later: texts change, so old rounds fade (half in 34)."""


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Seconds of each part of a round, as `calibrate` measured them.

    Attributes:
        contexts: lengths of text at which passes were measured, ascending.
        tokens: widths of passes, ascending from 1.
        pass_s: of a target pass: one line per context, one number per width.
        head_s: of the LM head and the choice, by width.
        root_s: of drafting a first level.
        widths: of further levels, ascending from 1.
        step_s: of one further level, by width; empty where nothing is drafted by a model.
        encode_s: of encoding verified tokens, by number of `tokens`.
        plain_rest_s: of a round without drafts, beyond its pass and head.
        draft_rest_s: of a round with drafts, beyond all of these parts.

    Raises:
        InputError: lists that do not fit one another, or a number that is not a positive time.
    """

    contexts: tuple[int, ...]
    tokens: tuple[int, ...]
    pass_s: tuple[tuple[float, ...], ...]
    head_s: tuple[float, ...]
    root_s: float
    widths: tuple[int, ...]
    step_s: tuple[float, ...]
    encode_s: tuple[float, ...]
    plain_rest_s: float = 0.0
    draft_rest_s: float = 0.0

    def __post_init__(self) -> None:
        fits = len(self.pass_s) == len(self.contexts) > 0 and len(self.step_s) == len(self.widths)
        lines = (*self.pass_s, self.head_s, self.encode_s)
        fits = fits and all(len(line) == len(self.tokens) > 0 for line in lines)
        single = (self.root_s, self.plain_rest_s, self.draft_rest_s)
        times = [*single, *self.step_s, *(t for line in lines for t in line)]
        if not fits or not np.isfinite(times).all() or min(times) < 0:
            raise InputError(
                "A cost table needs one pass line per context, one time per width, and times of at "
                "least 0. Measure it anew with `moaspec calibrate`."
            )

    def verify_s(self, num_tokens: Floats | float, context: int) -> Floats:
        """A target pass over so many tokens, its head included."""
        by_context = [_between(num_tokens, self.tokens, line) for line in self.pass_s]
        share = np.interp(context, self.contexts, np.arange(len(self.contexts)))
        low = min(int(share), len(by_context) - 1)
        high = min(low + 1, len(by_context) - 1)
        part = by_context[low] + (share - low) * (by_context[high] - by_context[low])
        return part + _between(num_tokens, self.tokens, self.head_s)

    def draft_s(self, depth: int, breadth: int, num_rows: int) -> float:
        """Growing trees for so many rows together, and what else a round with drafts takes."""
        wider = self.step_s_of(num_rows) - self.step_s_of(1)
        first = self.root_s + wider + self.draft_rest_s
        return first + (depth - 1) * self.step_s_of(breadth * num_rows)

    def accept_s(self, num_tokens: Floats | float) -> Floats:
        """Encoding of so many newly verified tokens."""
        return _between(num_tokens, self.tokens, self.encode_s)

    def step_s_of(self, width: float) -> float:
        """Drafting a further level of so many nodes."""
        return float(_between(width, self.widths, self.step_s)) if self.widths else 0.0

    def plain_s(self, context: int, num_rows: int = 1) -> float:
        """One row's share of a round without drafts."""
        return (float(self.verify_s(num_rows, context)) + self.plain_rest_s) / num_rows


def _between(x: Floats | float, xs: Sequence[int], ys: Sequence[float]) -> Floats:
    """Linear interpolation; beyond the last point its slope goes on, before the first nothing."""
    inside: Floats = np.asarray(np.interp(x, xs, ys))
    if len(xs) < 2:
        return inside
    slope = max(0.0, (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]))
    return inside + slope * np.maximum(0.0, np.asarray(x) - xs[-1])


class Acceptance:
    """How often the target chose drafts of each depth and rank: a prior, then a row's own counts.

    What one depth shows moves the expectation of all of them, because drafters are about as good
    at every step; a depth's own counts then say how it differs.

    Args:
        prior: rates for depth 1, 2, ... by rank; the last line is repeated for deeper ones, and
            ranks that it leaves out get half of the rank before, or of what is left.
    """

    def __init__(self, prior: Sequence[Sequence[float]] = PRIOR) -> None:
        lines = [list(line[:MAX_RANK]) for line in prior[:MAX_DEPTH]]
        lines += lines[-1:] * (MAX_DEPTH - len(lines))
        self._prior_DR = np.clip(np.array([_all_ranks(line) for line in lines]), 1e-3, 0.98)
        self._hits_DR = np.zeros((MAX_DEPTH, MAX_RANK))
        self._trials_DR = np.zeros((MAX_DEPTH, MAX_RANK))

    def count(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Take in one round: which child was chosen at every node that the walk came to."""
        self._hits_DR *= MEMORY
        self._trials_DR *= MEMORY
        own = np.array(tree.parents[: len(tree.parents) - tree.num_copied], dtype=np.int64)
        for depth, node in enumerate((-1, *accepted)):
            siblings = (own == node).nonzero()[0][:MAX_RANK]
            if depth == MAX_DEPTH or not len(siblings):
                return
            self._trials_DR[depth, : len(siblings)] += 1
            if depth < len(accepted):
                self._hits_DR[depth, : len(siblings)] += siblings == accepted[depth]

    @property
    def rates(self) -> Floats:
        """(D, R): P(the target chooses the draft), given that it chose the path to it."""
        pooled = self._prior_DR.mean(0)
        seen = (PRIOR_ROUNDS * pooled + self._hits_DR.sum(0)) / (
            PRIOR_ROUNDS + self._trials_DR.sum(0)
        )
        shift_R = _logit(seen) - _logit(pooled)
        prior_DR = 1.0 / (1.0 + np.exp(-_logit(self._prior_DR) - shift_R))
        rates = (PRIOR_ROUNDS * prior_DR + self._hits_DR) / (PRIOR_ROUNDS + self._trials_DR)
        # Siblings exclude one another, so their rates cannot sum to more than one.
        return rates / np.maximum(1.0, rates.sum(1, keepdims=True))


def _all_ranks(rates: Sequence[float]) -> list[float]:
    filled = list(rates)
    while len(filled) < MAX_RANK:
        filled.append(0.5 * max(0.0, min(filled[-1], 1.0 - sum(filled))))
    return filled


def _logit(p: Floats) -> Floats:
    p = np.clip(p, 1e-4, 1 - 1e-4)
    return np.log(p / (1 - p))


def expected_accepted(rates_DR: Floats, breadth: int) -> Iterator[Floats]:
    """Drafts that the target is expected to accept, for depth 1, 2, ... and 1, 2, ... nodes.

    Grows the tree that these rates favour as a drafter grows its own: the best `breadth` nodes of a
    level are expanded, the best nodes of all levels are kept. A drafter that also knows when it is
    sure does better, so this is a lower bound.

    Yields:
        One array per depth; its n-th number belongs to a tree of n + 1 nodes.
    """
    frontier = np.ones(1)
    nodes = np.empty(0)
    for rates_R in rates_DR:
        reach = (frontier[:, None] * rates_R[:breadth]).ravel()
        nodes = np.sort(np.concatenate((nodes, reach)))[::-1]
        frontier = np.sort(reach)[::-1][:breadth]
        yield nodes.cumsum()


@dataclass(frozen=True)
class Choice:
    """A shape and what it promises.

    Attributes:
        shape: of the drafts.
        speedup: expected tokens per second over those of plain decoding.
    """

    shape: Tree
    speedup: float


@dataclass(frozen=True)
class Prospect:
    """What drafts promise by acceptance rates alone.

    Attributes:
        costs: of this machine.
        rates_DR: see `Acceptance`.
        context: tokens of the text.
        num_rows: rows that run together.
    """

    costs: CostTable
    rates_DR: Floats
    context: int
    num_rows: int = 1

    @cached_property
    def plain_s(self) -> float:
        """A round without drafts."""
        return self.costs.plain_s(self.context, self.num_rows)

    def best(self) -> Choice:
        """The shape of the most expected tokens per second, even where plain decoding has more."""
        choices = (c for b in BREADTHS for c in self._of_breadth(b))
        return max(choices, key=lambda choice: choice.speedup)

    def _of_breadth(self, breadth: int) -> Iterator[Choice]:
        """The best size of every depth."""
        for depth, accepted in enumerate(expected_accepted(self.rates_DR, breadth), start=1):
            totals = TOTALS[np.searchsorted(TOTALS, depth) :]
            totals = totals[: np.searchsorted(totals, len(accepted), side="right")]
            if not len(totals):
                continue
            emitted = 1.0 + accepted[totals - 1]
            seconds = self._fixed_s(depth, breadth) + self._verify_s(totals)
            seconds = seconds + self.costs.accept_s(emitted)
            best = int((emitted / seconds).argmax())
            yield Choice(
                Tree(depth, breadth, int(totals[best])),
                float(emitted[best] / seconds[best] * self.plain_s),
            )

    def _fixed_s(self, depth: int, breadth: int) -> float:
        return self.costs.draft_s(depth, breadth, self.num_rows) / self.num_rows

    def _verify_s(self, drafted: npt.NDArray[np.int64]) -> Floats:
        tokens = self.num_rows * (1.0 + drafted.astype(np.float64))
        return self.costs.verify_s(tokens, self.context) / self.num_rows


class RoundCosts:
    """What one row's share of a round costs here, looked up instead of interpolated.

    Args:
        costs: of this machine.
        rate: how often the target chooses the drafter's favourite.
        context: tokens of the text.
        num_rows: rows that run together.

    Attributes:
        plain_s: a round without drafts.
        tree: the tree that grows as far as it pays.
    """

    def __init__(self, costs: CostTable, rate: float, context: int, num_rows: int) -> None:
        self.plain_s = costs.plain_s(context, num_rows)
        self._costs, self._context, self._num_rows = costs, context, num_rows
        self._accept_s = costs.accept_s(np.arange(MOST_DRAFTS + 2.0)).tolist()
        self._first_s = costs.draft_s(1, 1, num_rows) / num_rows
        self._level_s = [costs.step_s_of(w * num_rows) / num_rows for w in range(1, MAX_RANK + 1)]
        tokens = num_rows * np.arange(1.0, MOST_DRAFTS + 2)
        verify_s = np.maximum.accumulate(costs.verify_s(tokens, context)) / num_rows
        self._verify_s = verify_s.tolist()
        tokens_per_s = GAIN / self.plain_s
        prices = tokens_per_s * (verify_s[1:] - verify_s[0])
        total = max(1, int((prices < MAX_DEPTH).sum()))  # no more can be accepted
        depth = min(total, MAX_DEPTH)
        going_on = tokens_per_s * self._level_s[0] + float(prices[depth - 1]) / depth
        self.tree = PricedTree(
            depth,
            MAX_RANK,
            total,
            prices=tuple(prices[:total].tolist()),
            least=min(1.0, going_on / rate),
        )
        self._widest = min(MAX_RANK, int(1.0 / self.tree.least)) if self.tree.least else MAX_RANK

    def drafted_s(self, levels: int, num_read: int, num_drafts: int) -> float:
        """Drafting and verifying, without encoding.

        Args:
            levels: that were drafted.
            num_read: nodes that were drafted on.
            num_drafts: drafts that are verified.
        """
        further = levels - 1
        width = min(max(1, -(-num_read // further)), MAX_RANK) if further else 1
        return self._first_s + further * self._level_s[width - 1] + self._pass_s(num_drafts)

    def risk_s(self, tree: PricedTree) -> float:
        """What a round loses at most if its drafts are all rejected."""
        # Paths of a level exclude one another, so that few can be as probable as `least`.
        num_read = (tree.depth - 1) * self._widest
        drafted_s = self.drafted_s(tree.depth, num_read, tree.total_tokens)
        return drafted_s - self.plain_s + self.accept_s(1)

    def accept_s(self, num_tokens: int) -> float:
        """Encoding of so many newly verified tokens."""
        if num_tokens < len(self._accept_s):
            return float(self._accept_s[num_tokens])
        return float(self._costs.accept_s(num_tokens))

    def _pass_s(self, num_drafts: int) -> float:
        if num_drafts < len(self._verify_s):
            return float(self._verify_s[num_drafts])
        tokens = self._num_rows * (1.0 + num_drafts)
        return float(self._costs.verify_s(tokens, self._context)) / self._num_rows
