"""How many tokens a device drafts: the chain with the most expected tokens per second.

gamma drafts, t_d each; R the round trip; t_v the server's pass; A(gamma) expected tokens of a
round, the bonus token included; h the probability that a round's text is what was drafted ahead.

Synchronous: A / (gamma t_d + R + t_v). Ahead: A / (max(gamma t_d, R + t_v) + (1 - h) gamma t_d).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from moaspec.drafting.draft_tree import DraftTree, Tree
from moaspec.drafting.policy.cost_model import MAX_DEPTH, PRIOR, AcceptanceRates
from moaspec.drafting.policy.policies import DraftPolicy
from moaspec.drafting.tree_shapes import Chain

MAX_DRAFTS = 24
"""Largest number of drafts; beyond `MAX_DEPTH` the acceptance of the last depth is assumed."""

ASSUMED_WAIT_S, ASSUMED_STEP_S = 0.05, 0.01
"""Assumed before the first round trip and the first draft."""


class LinkPolicy(DraftPolicy):
    """The `DraftPolicy` of a device.

    Args:
        wait_s: current time of a round trip with its pass; None before the first.
        step_s: current time of one drafted token; None before the first.
        ahead: whether the device drafts while it waits for a verdict.
        prior: acceptance rates to start from.
    """

    wants_features = True

    def __init__(
        self,
        *,
        wait_s: Callable[[], float | None],
        step_s: Callable[[], float | None],
        ahead: bool,
        prior: Sequence[Sequence[float]] = PRIOR,
    ) -> None:
        self._wait_s, self._step_s, self._ahead = wait_s, step_s, ahead
        self._acceptance = AcceptanceRates(prior)

    def shape(self, _length: int, _num_rows: int) -> Tree | None:
        """The chain with the most expected tokens per second."""
        return Chain(int(np.argmax(self.speeds())) + 1)

    def speeds(self) -> np.ndarray:
        """Expected tokens per second of chains of 1, 2, ... drafts."""
        rates = self._acceptance.rates
        rates = np.append(rates, np.full(MAX_DRAFTS - MAX_DEPTH, rates[-1]))
        reached = rates.cumprod()
        tokens = 1.0 + reached.cumsum()
        wait_s = _known_or(self._wait_s(), ASSUMED_WAIT_S)
        draft_s = np.arange(1, MAX_DRAFTS + 1) * _known_or(self._step_s(), ASSUMED_STEP_S)
        if not self._ahead:
            return np.asarray(tokens / (draft_s + wait_s))
        hit = reached * rates[0]
        return np.asarray(tokens / (np.maximum(draft_s, wait_s) + (1.0 - hit) * draft_s))

    def record_round(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Update acceptance rates; see `DraftPolicy`."""
        self._acceptance.count(tree, accepted)


def _known_or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else max(value, 1e-4)
