"""Length of a device's drafts, by the formula of docs/remote.md.

gamma drafts, t_d each; R the round trip; t_v the server's pass; A(gamma) expected tokens of a
round, the bonus token included; h the probability that a round's text is what was drafted ahead.

Synchronous: A / (gamma t_d + R + t_v). Ahead: A / (max(gamma t_d, R + t_v) + (1 - h) gamma t_d).
Without drafts, tokens are streamed: 1 / t_v.
"""

from collections.abc import Callable, Sequence
from math import ceil

import numpy as np

from moaspec.drafting.draft_tree import DraftTree, Tree
from moaspec.drafting.policy.cost_model import MAX_DEPTH, AcceptanceRates
from moaspec.drafting.policy.policies import DraftPolicy
from moaspec.drafting.tree_shapes import Chain
from moaspec.support.limits import MAX_FURTHER

MAX_DRAFTS = 24
"""Largest number of drafts; beyond `MAX_DEPTH` the acceptance of the last depth is assumed."""

PRIOR = ((0.5,),)
"""Acceptance rate to start from: of the bundled drafters' chains. A lower one would keep devices on
links with long round trips from the drafts that show how good they are."""

ASSUMED_WAIT_S, ASSUMED_STEP_S = 0.05, 0.01
"""Assumed before the first round trip and the first draft."""

MIN_PAUSE, MAX_PAUSE = 4, 4096
"""Rounds without drafts before drafts are tried again."""

MAX_MEASURING = 2
"""Most pauses of `2 * MIN_PAUSE` rounds for further measurements, once a draft step is known."""

MAX_LOSS = 0.005
"""Share of plain decoding's time that these trials may cost; the length of pauses follows.

Trials that take more than 20 rounds' time cost more, because of `MAX_PAUSE`.
"""


class LinkPolicy(DraftPolicy):
    """Drafts the chain with the most expected tokens per second, or none where none has more.

    After each pause one round drafts, because acceptance and times change; a pause ends early where
    drafts would pay by now. A device begins with a pause: tokens are streamed while it measures its
    draft steps.

    Args:
        wait_s: current time of a round trip with its pass; None before the first.
        step_s: current time of one drafted token; None before the first.
        plain_s: current time of a token without drafts; None, if unknown, has every round draft.
        measuring: whether `step_s` rests on too few steps to decide by it.
        ahead: whether the device drafts while it waits for a verdict.
        prior: acceptance rates to start from.

    Attributes:
        pause: rounds without drafts that follow the current one.
    """

    wants_features = True

    def __init__(
        self,
        *,
        wait_s: Callable[[], float | None],
        step_s: Callable[[], float | None],
        plain_s: Callable[[], float | None] = lambda: None,
        measuring: Callable[[], bool] = lambda: False,
        ahead: bool,
        prior: Sequence[Sequence[float]] = PRIOR,
    ) -> None:
        self._wait_s, self._step_s, self._plain_s = wait_s, step_s, plain_s
        self._measuring, self._may_measure = measuring, MAX_MEASURING
        self._ahead, self._acceptance = ahead, AcceptanceRates(prior)
        self.pause, self._paused = 0, False

    def shape(self, _length: int, _num_rows: int) -> Tree | None:
        """The best chain; None for a round without drafts."""
        plain_s = self._plain_s()
        if self.pause:
            self.pause -= 1
            is_due = self.pause >= MAX_FURTHER and self.pause % MAX_FURTHER == 0
            if is_due and self.speeds().max() * (plain_s or 0.0) >= 1.0:
                self.pause = MAX_FURTHER - 1  # tokens that are already asked for come first
            return None
        if plain_s is not None and self._must_measure():
            self.pause = 2 * MIN_PAUSE - 1  # each pause ends with a round trip
            return None
        wait_s = _known_or(self._wait_s(), ASSUMED_WAIT_S)
        tokens, round_s = self._rounds(wait_s)
        best = int(np.argmax(tokens / round_s))
        if plain_s is None or self._paused or tokens[best] * plain_s >= round_s[best]:
            self._paused = False
            return Chain(best + 1)
        # The round after a trial waits for a round trip, as tokens are not streamed yet.
        trial_s = round_s[best] + wait_s
        rounds = (trial_s / plain_s - tokens[best] - 1.0) / MAX_LOSS
        self.pause = min(max(ceil(rounds), MIN_PAUSE), MAX_PAUSE) - 1
        self._paused = True
        return None

    def _must_measure(self) -> bool:
        """Whether the device should measure draft steps before it decides."""
        if self._step_s() is None:
            return True
        if not self._measuring() or not self._may_measure:
            return False
        self._may_measure -= 1
        return True

    def _rounds(self, wait_s: float) -> tuple[np.ndarray, np.ndarray]:
        """Expected tokens, and seconds, of rounds with 1, 2, ... drafts."""
        rates = self._acceptance.rates
        rates = np.append(rates, np.full(MAX_DRAFTS - MAX_DEPTH, rates[-1]))
        reached = rates.cumprod()  # probability that so many drafts are accepted
        tokens = np.asarray(1.0 + reached.cumsum())
        draft_s = np.arange(1, MAX_DRAFTS + 1) * _known_or(self._step_s(), ASSUMED_STEP_S)
        if not self._ahead:
            return tokens, draft_s + wait_s
        hit = reached * rates[0]
        return tokens, np.maximum(draft_s, wait_s) + (1.0 - hit) * draft_s

    def speeds(self) -> np.ndarray:
        """Expected tokens per second of chains of 1, 2, ... drafts."""
        tokens, round_s = self._rounds(_known_or(self._wait_s(), ASSUMED_WAIT_S))
        return np.asarray(tokens / round_s)

    def record_round(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        if tree.tokens:
            self._acceptance.count(tree, accepted)


def _known_or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else max(value, 1e-4)
