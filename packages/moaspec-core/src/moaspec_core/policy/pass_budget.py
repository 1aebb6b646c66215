"""The choice of the drafts, of all requests, that one pass of the target verifies.

The measured cost of passes says how many drafts pay, possibly none. The pass verifies that number
of drafts, the most probable ones of all requests.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain, repeat

import numpy as np

from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.drafting.protocols import VerifyRequest, VerifyResult
from moaspec_core.drafting.tree_shapes import PricedTree, selected
from moaspec_core.policy.cost_model import PRIOR, CostTable, Floats

NEWEST = 0.1
"""Weight of a device's newest draft in its rate, the share of its drafts that were right."""
RECOVERY = 0.02
"""When a pass drops all of a device's drafts, its rate moves by this share of the gap towards a new
device's rate, so that its drafts are eventually tried again."""


def share_slots(
    trees: Sequence[DraftTree], by_shape: Mapping[Tree, Sequence[int]]
) -> list[DraftTree]:
    """The trees without the drafts that do not pay.

    Trees of fixed shapes and of proposers without probabilities stay whole.

    Args:
        trees: of all requests of one pass.
        by_shape: the indices of the requests that were drafted for in each shape.
    """
    kept = list(trees)
    priced = [(shape, own) for shape, own in by_shape.items() if isinstance(shape, PricedTree)]
    indices = [i for _, own in priced for i in own if trees[i].log_p]
    if len(indices) > 1:  # the tree of a single request was cut by its proposer
        prices = max((shape.prices for shape, _ in priced), key=len)
        cut = _best_drafts([trees[i] for i in indices], [trees[i].log_p for i in indices], prices)
        for i, tree in zip(indices, cut, strict=True):
            kept[i] = tree
    return kept


class PassBudget:
    """Chooses the drafts of passes whose requests belong to several engines and devices.

    Devices send no probabilities, so those of a device's drafts are estimated from its rate.

    Args:
        rate: the rate of a new device.
    """

    def __init__(self, costs: CostTable, rate: float = PRIOR[0][0]) -> None:
        self._costs, self._rate = costs, rate
        self._rates: dict[int, float] = {}

    def applied(self, requests: Sequence[VerifyRequest]) -> list[VerifyRequest]:
        """The requests of one pass without the drafts that do not pay.

        A request that loses all its drafts is not encoded now. If there is one request, it keeps
        its drafts: no other request waits for them.
        """
        most = sum(len(request.tree.tokens) for request in requests)
        if len(requests) == 1 or not most:
            return list(requests)
        prices = self._costs.prices(
            most,
            context=sum(request.num_verified for request in requests) // len(requests),
            num_requests=len(requests),
            num_tokens=sum(len(request.new_tokens) for request in requests),
        )
        trees = _best_drafts(
            [request.tree for request in requests], [*map(self._log_p, requests)], prices
        )
        return [
            request if tree is request.tree else self._without(request, tree)
            for request, tree in zip(requests, trees, strict=True)
        ]

    def _without(self, request: VerifyRequest, tree: DraftTree) -> VerifyRequest:
        """The request with the drafts of this tree, the rest of its own."""
        if tree.tokens:
            return replace(request, tree=tree)
        rate = self._rates.get(request.cache_row, self._rate)
        self._rates[request.cache_row] = rate + RECOVERY * (self._rate - rate)
        return replace(request, tree=tree, encode=False)

    def count(self, request: VerifyRequest, result: VerifyResult) -> None:
        """Update the rate of the request's device."""
        parents = (result.tree or request.tree).parents
        for parent, node in zip((-1, *result.accepted), (*result.accepted, None), strict=True):
            if parent in parents:
                rate = self._rates.get(request.cache_row, self._rate)
                right = node == parents.index(parent)
                self._rates[request.cache_row] = rate + NEWEST * (right - rate)

    def forget(self, cache_row: int) -> None:
        """Drop the rate of a cache row, which another device will use."""
        self._rates.pop(cache_row, None)

    def _log_p(self, request: VerifyRequest) -> Sequence[float]:
        """Log-probabilities of the drafts; the first of siblings is the most probable."""
        tree = request.tree
        if tree.log_p or not tree.tokens:
            return tree.log_p
        rate = min(max(self._rates.get(request.cache_row, self._rate), 0.01), 0.99)
        right, wrong = math.log(rate), math.log1p(-rate)
        if tree.is_chain:
            return [*accumulate(repeat(right, len(tree.tokens)))]
        ranks, log_p = Counter[int](), list[float]()
        for parent in tree.parents:
            log_p.append(right + ranks[parent] * wrong + (log_p[parent] if parent >= 0 else 0.0))
            ranks[parent] += 1
        return log_p


def _best_drafts(
    trees: Sequence[DraftTree],
    log_p_RN: Sequence[Sequence[float]],
    prices: Sequence[float] | Floats,
) -> list[DraftTree]:
    """The trees with the drafts whose expected accepted tokens most exceed their price."""
    log_p = np.fromiter(chain.from_iterable(log_p_RN), float)
    # Stable, so that a parent comes before a child that is as probable.
    order = np.argsort(-log_p, kind="stable")
    gains = np.exp(log_p[order]).cumsum() - _extended_prices(prices, len(log_p))
    number = int(gains.argmax()) + 1 if gains.max(initial=0.0) > 0.0 else 0
    if number == len(log_p):
        return list(trees)
    kept_N = np.zeros(len(log_p), bool)
    kept_N[order[:number]] = True
    flags, stops = kept_N.tobytes(), accumulate(len(tree.tokens) for tree in trees)
    return [
        selected(tree, flags[stop - len(tree.tokens) : stop])
        for tree, stop in zip(trees, stops, strict=True)
    ]


def _extended_prices(prices: Sequence[float] | Floats, number: int) -> Floats:
    """`number` prices; beyond the last one they grow by the last difference."""
    known = np.array([0.0, *prices])
    counts = np.arange(1, number + 1)
    beyond = np.maximum(0, counts - len(prices)) * (known[-1] - known[-2])
    return np.asarray(known[np.minimum(counts, len(prices))] + beyond)
