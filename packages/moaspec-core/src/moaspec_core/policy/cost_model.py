"""Costs of a round on this machine, and its expected tokens.

All functions compute from stored measurements and counts, and from times that others observed
(`observed_times.py`). They read no clock.

Legend: D depths.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import log2

import numpy as np
import numpy.typing as npt

from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.drafting.tree_shapes import PricedTree
from moaspec_core.errors import InputError
from moaspec_core.policy.observed_times import ObservedTimes

Floats = npt.NDArray[np.float64]

MAX_DEPTH, MAX_BREADTH = 8, 8
MAX_DRAFTS = 62  # drafts of a round at most, as many as the paper's tree has

GAIN = 1.15
"""Assumed speed-up over plain decoding; converts seconds into tokens. Simulated on 40 answers,
1.0 and 1.3 gave the same speed."""

EXCESS_STEPS = 3
"""Costs are those at the nearest of so many values of an observed excess between it and its double,
so that few are computed."""

CONTEXT_STEP = 512
"""Costs are those at the nearest multiple of this length of text, so that requests of similar
length share a tree's shape and are drafted together."""

PRIOR = ((0.28,),)
"""By depth, P(the target chooses the drafter's most probable token, given that it chose the path to
it), for a drafter that records no rates: the rate of the first bundled drafter for
SmolLM2-135M-Instruct. Lines may go on with the rates of its second choice, third and so on."""

PRIOR_ROUNDS = 4.0  # rounds that the prior counts for

MEMORY = 0.98
"""Weight of an observation one round later (a half after 34 rounds), as texts change."""


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Seconds of each part of a round, as `calibrate` measured them.

    Raises:
        InputError: lists of unequal length, lengths or widths that do not ascend, or a negative or
            infinite time.
    """

    contexts: tuple[int, ...]  # lengths of text at which passes were measured, ascending
    tokens: tuple[int, ...]  # widths of passes, ascending from 1
    # Of a target pass: one line per context, one number per width.
    pass_s: tuple[tuple[float, ...], ...]
    head_s: tuple[float, ...]  # of the LM head and the choice, by width
    root_s: float  # of drafting a first level
    widths: tuple[int, ...]  # of further levels, ascending from 1
    # Of one further level, by width; empty where nothing is drafted by a model.
    step_s: tuple[float, ...]
    encode_s: tuple[float, ...]  # of encoding verified tokens, by number of `tokens`
    plain_rest_s: float = 0.0  # of a round without drafts, beyond its pass and head
    draft_rest_s: float = 0.0  # of a round with drafts, beyond all of these parts
    # Of the LM head where a choice asks for all logits, by width; empty: as `head_s`.
    logits_s: tuple[float, ...] = ()
    row_s: float = 0.0  # that each further request adds to drafting a first level
    decide_s: float = 0.0  # of deciding about drafts and copies, in each round that may have them
    # Whether other processes used the CPU meanwhile, so that all of this is too long.
    busy: bool = False

    def __post_init__(self) -> None:
        fits = len(self.pass_s) == len(self.contexts) > 0 and len(self.step_s) == len(self.widths)
        lines = (*self.pass_s, self.head_s, self.encode_s, self.logits_s or self.head_s)
        fits = fits and all(len(line) == len(self.tokens) > 0 for line in lines)
        fits = fits and all(map(_ascend, (self.contexts, self.tokens, self.widths)))
        single = (self.root_s, self.row_s, self.plain_rest_s, self.draft_rest_s, self.decide_s)
        times = [*single, *self.step_s, *(t for line in lines for t in line)]
        if not fits or not np.isfinite(times).all() or min(times) < 0:
            raise InputError(
                "A cost table needs one pass line per context, one time per width, widths and "
                "contexts that ascend, and times of at least 0. Measure it anew with `moaspec "
                "calibrate`."
            )

    @property
    def with_logits(self) -> CostTable:
        """The costs of choices that need all logits; greedy ones need only the argmax."""
        return replace(self, head_s=self.logits_s or self.head_s)

    def with_excess(self, factor: float, num_requests: int) -> CostTable:
        """These costs where all that drafts add to a plain round of `num_requests` takes longer."""
        if factor == 1.0:
            return self

        def beyond(line: Sequence[float]) -> tuple[float, ...]:
            plain_s = float(_between(num_requests, self.tokens, line))
            return tuple(max(0.0, plain_s + factor * (pass_s - plain_s)) for pass_s in line)

        return replace(
            self,
            pass_s=tuple(map(beyond, self.pass_s)),
            head_s=beyond(self.head_s),
            logits_s=beyond(self.logits_s) if self.logits_s else (),
            root_s=factor * self.root_s,
            row_s=factor * self.row_s,
            step_s=tuple(factor * seconds for seconds in self.step_s),
            encode_s=tuple(factor * seconds for seconds in self.encode_s),
            draft_rest_s=factor * self.draft_rest_s,
        )

    def verify_s(self, num_tokens: Floats | float, context: int) -> Floats:
        """Seconds of a target pass over `num_tokens` tokens, with its head.

        Attention takes longer with each token of context, also beyond the last one measured.
        """
        by_context = [_between(num_tokens, self.tokens, line) for line in self.pass_s]
        high = min(bisect_left(self.contexts, context), len(by_context) - 1)
        low = max(0, high - 1)
        growth, step = by_context[high] - by_context[low], self.contexts[high] - self.contexts[low]
        share = max(0.0, (context - self.contexts[low]) / max(1, step))
        part = by_context[low] + min(1.0, share) * growth
        part = part + max(0.0, share - 1.0) * np.maximum(0.0, growth)
        return part + _between(num_tokens, self.tokens, self.head_s)

    def draft_s(self, depth: int, breadth: int, num_requests: int) -> float:
        """Seconds of drafting for `num_requests` requests, with the overhead of a drafted round."""
        wider = self.step_s_of(num_requests) - self.step_s_of(1)
        first = self.root_s + max(wider, (num_requests - 1) * self.row_s) + self.draft_rest_s
        return first + (depth - 1) * self.level_s(breadth, num_requests)

    def level_s(self, breadth: int, num_requests: int) -> float:
        """Seconds of a later level: requests one by one (kernels) or all at once, if longer."""
        drafted_before = (num_requests - 1) * self.row_s / self.root_s if self.root_s else 0.0
        one_by_one_s = self.step_s_of(breadth) * (1.0 + drafted_before)
        return max(one_by_one_s, self.step_s_of(breadth * num_requests))

    def prices(
        self, most: int, *, context: int, num_requests: int, num_tokens: int | None = None
    ) -> Floats:
        """Added costs of verifying 1, 2, ... `most` drafts of all requests, in tokens.

        One token is the time that a request takes per token at a speed-up of `GAIN`.

        Args:
            num_tokens: of the pass without drafts; None is one for each request.
        """
        tokens = (num_tokens or num_requests) + np.arange(most + 1.0)
        verify_s = np.maximum.accumulate(self.verify_s(tokens, context))
        return np.asarray((verify_s[1:] - verify_s[0]) * GAIN / self.plain_s(context, num_requests))

    def accept_s(self, num_tokens: Floats | float) -> Floats:
        """Seconds of encoding `num_tokens` newly verified tokens."""
        return _between(num_tokens, self.tokens, self.encode_s)

    def step_s_of(self, width: float) -> float:
        """Seconds of drafting a further level of `width` nodes."""
        return float(_between(width, self.widths, self.step_s)) if self.widths else 0.0

    def plain_s(self, context: int, num_requests: int = 1) -> float:
        """Seconds of a round without drafts, divided by its requests."""
        return (float(self.verify_s(num_requests, context)) + self.plain_rest_s) / num_requests


def _ascend(numbers: Sequence[int]) -> bool:
    """Whether they are whole numbers from 1, each larger than the one before."""
    whole = all(isinstance(number, int) and 1 <= number < 2**31 for number in numbers)
    return whole and all(low < high for low, high in pairwise(numbers))


def _between(x: Floats | float, xs: Sequence[int], ys: Sequence[float]) -> Floats:
    """Linear interpolation; the last slope continues beyond the last point."""
    inside: Floats = np.asarray(np.interp(x, xs, ys))
    if len(xs) < 2:
        return inside
    slope = max(0.0, (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]))
    return inside + slope * np.maximum(0.0, np.asarray(x) - xs[-1])


class AcceptanceRates:
    """How often the target chooses the drafter's most probable token (its favourite), by depth.

    The estimate starts from a prior. A request's counts at all depths shift the prior of every
    depth by the same amount; then the counts at each depth correct that depth's estimate.

    Args:
        prior: see `PRIOR`; depths beyond the last line repeat it.
    """

    def __init__(self, prior: Sequence[Sequence[float]] = PRIOR) -> None:
        rates = [line[0] for line in prior[:MAX_DEPTH]]
        rates += rates[-1:] * (MAX_DEPTH - len(rates))
        self._prior_D = np.clip(np.array(rates), 1e-3, 0.98)
        self._hits_D, self._trials_D = np.zeros(MAX_DEPTH), np.zeros(MAX_DEPTH)

    def count(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Count one round: at each node of the accepted path, whether the favourite was chosen."""
        self._hits_D *= MEMORY
        self._trials_D *= MEMORY
        own = tree.parents[: len(tree.parents) - tree.num_copied]
        for depth, node in enumerate((-1, *accepted)):
            if depth == MAX_DEPTH or node not in own:
                return
            self._trials_D[depth] += 1
            if depth < len(accepted):
                self._hits_D[depth] += accepted[depth] == own.index(node)

    @property
    def rates(self) -> Floats:
        """(D,): P(the target chooses the favourite), given that it chose the path to it."""
        pooled = self._prior_D.mean()
        seen = (PRIOR_ROUNDS * pooled + self._hits_D.sum()) / (PRIOR_ROUNDS + self._trials_D.sum())
        shift = _logit(seen) - _logit(pooled)
        prior_D = 1.0 / (1.0 + np.exp(-_logit(self._prior_D) - shift))
        rates: Floats = (PRIOR_ROUNDS * prior_D + self._hits_D) / (PRIOR_ROUNDS + self._trials_D)
        return rates


def _logit(p: Floats | float) -> Floats:
    p = np.clip(p, 1e-4, 1 - 1e-4)
    return np.log(p / (1 - p))


def chain_speedups(
    costs: CostTable, rates_D: Floats, context: int, num_requests: int = 1
) -> Floats:
    """(D,): tokens per second with chains of 1, 2, ... drafts over those of plain decoding.

    A lower bound: trees that follow the drafter's probabilities are faster than chains.

    Args:
        num_requests: requests that are decoded together, all with chains of this length.
    """
    emitted_D = 1.0 + rates_D.cumprod().cumsum()
    lengths_D = np.arange(1.0, 1.0 + len(rates_D))
    seconds_D = costs.verify_s(num_requests * (1.0 + lengths_D), context)
    seconds_D = seconds_D + costs.draft_s(1, 1, num_requests)
    seconds_D = seconds_D + (lengths_D - 1.0) * costs.level_s(1, num_requests)
    seconds_D = (seconds_D + costs.accept_s(num_requests * emitted_D)) / num_requests
    return np.asarray(emitted_D / seconds_D * costs.plain_s(context, num_requests))


def best_chain(costs: CostTable, prior: Sequence[Sequence[float]]) -> tuple[int, float]:
    """Length of the fastest chain in a short text, and its speed-up over plain decoding."""
    speedups = chain_speedups(costs, AcceptanceRates(prior).rates, costs.contexts[0])
    length = int(speedups.argmax())
    return length + 1, float(speedups[length])


class RoundCosts:
    """One request's share of the costs of a round, interpolated in advance.

    Attributes:
        plain_s: a round without drafts.
        excess: the factor that `CostTable.with_excess` got.
        speedup: the largest of `chain_speedups`.
        tree: the shape for a request, if no other request of the pass has drafts.
    """

    def __init__(
        self,
        costs: CostTable,
        rates_D: Floats,
        context: int,
        num_requests: int,
        *,
        excess: float = 1.0,
    ) -> None:
        self.plain_s, self.excess = costs.plain_s(context, num_requests), excess
        self.speedup = float(chain_speedups(costs, rates_D, context, num_requests).max())
        self._costs, self._context, self._num_requests = costs, context, num_requests
        encoded = num_requests * np.arange(MAX_DRAFTS + 2.0)
        self._accept_s = (costs.accept_s(encoded) / num_requests).tolist()
        self._first_s = costs.draft_s(1, 1, num_requests) / num_requests
        self._level_s = [
            costs.level_s(breadth, num_requests) / num_requests
            for breadth in range(1, MAX_BREADTH + 1)
        ]
        tokens = num_requests * np.arange(1.0, MAX_DRAFTS + 2)
        verify_s = np.maximum.accumulate(costs.verify_s(tokens, context)) / num_requests
        self._verify_s = verify_s.tolist()
        prices = costs.prices(MAX_DRAFTS, context=context, num_requests=num_requests)
        total = max(1, int((prices < MAX_DEPTH).sum()))  # no more can be accepted
        depth = min(total, MAX_DEPTH)
        breadth = MAX_BREADTH
        if num_requests > 1 and prices[MAX_BREADTH - 1] > 1.0:
            # No second choice pays, and a pass of several chains has no pads.
            breadth, total = 1, depth
        going_on = GAIN / self.plain_s * self._level_s[0] + float(prices[depth - 1]) / depth
        self.tree = PricedTree(
            depth,
            breadth,
            total,
            prices=tuple(prices[:total].tolist()),
            least=min(1.0, going_on / float(rates_D[0])),
        )
        least = max(self.tree.least, 1.0 / breadth)
        self._widest = int(1.0 / least)

    def drafted_s(self, levels: int, num_expanded: int, num_drafts: int) -> float:
        """Seconds of drafting and verifying, without encoding.

        Args:
            num_expanded: nodes that got children.
        """
        later = levels - 1
        width = min(max(1, -(-num_expanded // later)), MAX_BREADTH) if later else 1
        return self._first_s + later * self._level_s[width - 1] + self.pass_s(num_drafts)

    def risk_s(self, tree: PricedTree) -> float:
        """The most that a round loses if all its drafts are rejected, in seconds."""
        # The probabilities of a level's paths sum to at most 1, which limits those above `least`.
        num_expanded = (tree.depth - 1) * self._widest
        drafted_s = self.drafted_s(tree.depth, num_expanded, tree.total_tokens)
        return drafted_s - self.plain_s + self.accept_s(1)

    def accept_s(self, num_tokens: int) -> float:
        if num_tokens < len(self._accept_s):
            return float(self._accept_s[num_tokens])
        return float(self._costs.accept_s(self._num_requests * num_tokens)) / self._num_requests

    def pass_s(self, num_drafts: int) -> float:
        """Seconds of verifying `num_drafts` drafts."""
        if num_drafts < len(self._verify_s):
            return float(self._verify_s[num_drafts])
        tokens = self._num_requests * (1.0 + num_drafts)
        return float(self._costs.verify_s(tokens, self._context)) / self._num_requests


class KnownCosts:
    """Computes `RoundCosts` once for each length of text and number of requests.

    Args:
        times: correct the table's costs of drafts; None: the table decides alone.
    """

    def __init__(
        self,
        table: CostTable,
        prior: Sequence[Sequence[float]] = PRIOR,
        times: ObservedTimes | None = None,
    ) -> None:
        self.table, self.rates_D = table, AcceptanceRates(prior).rates
        self.times = times
        self._costs: dict[tuple[int, int, int], RoundCosts] = {}  # by context, requests, step
        self._excess, self._step = 1.0, 0

    @property
    def excess(self) -> float:
        """Factor by which drafts cost more than in the table."""
        return 1.0 if self.times is None else self.times.excess

    def at(self, length: int, num_requests: int) -> RoundCosts:
        """Costs of a request with `length` tokens, among `num_requests` requests."""
        context = (length + CONTEXT_STEP // 2) // CONTEXT_STEP * CONTEXT_STEP
        if self._excess != self.excess:
            self._excess, self._step = self.excess, round(EXCESS_STEPS * log2(self.excess))
        step = self._step
        costs = self._costs.get((context, num_requests, step))
        if costs is None:
            excess = 2.0 ** (step / EXCESS_STEPS)
            table = self.table.with_excess(excess, num_requests)
            costs = RoundCosts(table, self.rates_D, context, num_requests, excess=excess)
            self._costs[context, num_requests, step] = costs
        return costs


class FadingRate:
    """A ratio of counts that starts from an expected value and weights newer rounds more."""

    def __init__(self, expected: float, rounds: float = PRIOR_ROUNDS) -> None:
        self._expected, self._rounds = expected, rounds
        self._hits = self._trials = 0.0

    @property
    def value(self) -> float:
        return (self._rounds * self._expected + self._hits) / (self._rounds + self._trials)

    def count(self, hits: float, trials: float) -> None:
        """Count one round, even one without trials: earlier rounds fade."""
        self._hits, self._trials = MEMORY * self._hits + hits, MEMORY * self._trials + trials
