"""Length of a device's drafts, by the formula of docs/remote.md.

gamma drafts, t_d each; R the round trip; t_v the server's pass; A(gamma) expected tokens of a
round, the bonus token included; h the probability that a round's text is what was drafted ahead.

Synchronous: A / (gamma t_d + R + t_v). Ahead: A / (max(gamma t_d, R + t_v) + (1 - h) gamma t_d).
Without drafts, tokens are streamed: 1 / t_v.
"""

from collections.abc import Callable, Sequence
from math import ceil

import numpy as np

from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.policy.cost_model import MAX_DEPTH, AcceptanceRates
from moaspec_core.policy.policies import DraftPolicy
from moaspec_core.support.limits import MAX_STREAMED

MAX_DRAFTS = 24
"""Largest number of drafts; beyond `MAX_DEPTH` the acceptance of the last depth is assumed."""

PRIOR = ((0.5,),)
"""Acceptance rate to start from: of the bundled drafters' chains."""

ONE_DRAFT = DraftTree((0,), (-1,))

ASSUMED_WAIT_S, ASSUMED_STEP_S = 0.05, 0.01
"""Times assumed before the first round trip and the first draft step."""

STREAM_SLACK_S = 0.25
"""Time, beyond a round trip, for which the server streams without a new request, so that a lost
packet or the first draft step does not stop the stream."""

NUM_OBSERVED, OBSERVED_EVERY = 16, 4
"""Streamed tokens that are drafted too: all of the first ones, then a part, to save energy."""

MIN_GAIN = 1.05
"""Least expected speed-up for which a device begins to draft, which costs a round trip."""

FIRST_LOSS, LOSS_PER_TOKEN = 1.5, 0.005
"""The budget of drafts: tokens that they may cost at first, and more for each streamed token. Gains
of drafts are added."""

MAX_STEP_SHARE = 0.8
"""Most time of a draft step, relative to that of a streamed token, for tokens to be observed."""

MAX_BUDGET = 16.0
"""Largest budget, in tokens."""


class LinkPolicy(DraftPolicy):
    """Drafts the chain with most expected tokens per second, or none if plain decoding is faster.

    A device begins without drafts. While tokens are streamed, it drafts the next one and compares:
    this takes no round trip, and shows the time of a draft step and the acceptance.

    Args:
        wait_s: current time of a round trip with its pass; None before the first.
        step_s: current time of one drafted token; None before the first.
        plain_s: current time of a token without drafts; None if unknown: every round drafts.
        measuring: whether `step_s` rests on too few steps to decide by it.
        counts: whether the latest request sent drafts and was sent once.
        ahead: whether the device drafts while it waits for a verdict.

    Attributes:
        pause: rounds without drafts that the server streams after the current one. Each such round
            sets it anew; once drafts pay, it counts down to their start.
    """

    wants_features = True

    def __init__(
        self,
        *,
        wait_s: Callable[[], float | None],
        step_s: Callable[[], float | None],
        plain_s: Callable[[], float | None] = lambda: None,
        measuring: Callable[[], bool] = lambda: False,
        counts: Callable[[], bool] = lambda: True,
        ahead: bool,
    ) -> None:
        self._wait_s, self._step_s, self._plain_s = wait_s, step_s, plain_s
        self._measuring, self._counts = measuring, counts
        self._ahead, self._acceptance = ahead, AcceptanceRates(PRIOR)
        self.pause = self._num_plain = 0
        self._budget, self._cost = FIRST_LOSS, 1.0

    @property
    def observes(self) -> bool:
        """Whether to draft the token that is streamed.

        A step must fit well between two tokens, and drafts must pay if all of them are right.
        """
        if self._num_plain == 1:
            return False  # the request that begins the stream goes out first
        step_s, plain_s = self._step_s(), self._plain_s()
        if self._measuring() or step_s is None or plain_s is None:
            return True
        due = self._num_plain <= NUM_OBSERVED or self._num_plain % OBSERVED_EVERY == 0
        if not due or step_s >= MAX_STEP_SHARE * plain_s:
            return False
        return float(self.speeds(np.ones(MAX_DEPTH)).max()) * plain_s >= MIN_GAIN

    def shape(self, _length: int, _num_rows: int, _copied: float = 0.0) -> Tree | None:
        """The best chain; None for a round without drafts."""
        plain_s, wait_s = self._plain_s(), _known_or(self._wait_s(), ASSUMED_WAIT_S)
        tokens, round_s = self._rounds(self._acceptance.rates)
        best = int(np.argmax(tokens / round_s))
        if plain_s is None:
            return Chain(best + 1)
        plain_s = max(plain_s, 1e-4)
        known = self._step_s() is not None and not self._measuring()
        gain = tokens[best] * plain_s / round_s[best]
        pays = known and self._budget > 0 and gain >= (MIN_GAIN if self.pause else 1.0)
        if pays and not self.pause:
            # Before the first drafts the server waits for a round trip.
            begins_s = wait_s - plain_s if self._num_plain else 0.0
            self._cost = float(round_s[best] + begins_s) / plain_s
            self._num_plain = 0
            return Chain(best + 1)
        self._num_plain += 1
        self._add(LOSS_PER_TOKEN)
        if pays:
            self.pause -= 1  # tokens that are already asked for come first
        else:
            self.pause = min(ceil((wait_s + STREAM_SLACK_S) / plain_s), MAX_STREAMED)
        return None

    def _rounds(self, rates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Expected tokens, and seconds, of rounds with 1, 2, ... drafts."""
        wait_s = _known_or(self._wait_s(), ASSUMED_WAIT_S)
        rates = np.append(rates, np.full(MAX_DRAFTS - MAX_DEPTH, rates[-1]))
        reached = rates.cumprod()  # probability that all drafts up to here are accepted
        tokens = np.asarray(1.0 + reached.cumsum())
        draft_s = np.arange(1, MAX_DRAFTS + 1) * _known_or(self._step_s(), ASSUMED_STEP_S)
        if not self._ahead:
            return tokens, draft_s + wait_s
        hit = reached * rates[0]
        return tokens, np.maximum(draft_s, wait_s) + (1.0 - hit) * draft_s

    def speeds(self, rates: np.ndarray | None = None) -> np.ndarray:
        """Expected tokens per second of chains of 1, 2, ... drafts; `rates`: of acceptance."""
        tokens, round_s = self._rounds(self._acceptance.rates if rates is None else rates)
        return np.asarray(tokens / round_s)

    @property
    def gain(self) -> float | None:
        """Expected speed of the best chain, relative to streaming without drafts.

        None until both are measured.
        """
        plain_s = self._plain_s()
        if plain_s is None or self._step_s() is None or self._measuring():
            return None
        return float(self.speeds().max()) * max(plain_s, 1e-4)

    def record_round(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Count a round that sent drafts; of drafts that the server dropped the tree is empty."""
        if self._counts():
            if tree.tokens:
                self._acceptance.count(tree, accepted)
            self._add(len(accepted) + 1 - self._cost)

    def _add(self, tokens: float) -> None:
        """Add to the budget; outliers do not forbid drafts for long."""
        self._budget = min(max(self._budget + tokens, -FIRST_LOSS), MAX_BUDGET)

    def observe(self, is_right: bool) -> None:
        """Count a draft of a token that the server streamed."""
        self._acceptance.count(ONE_DRAFT, (0,) if is_right else ())


def _known_or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else max(value, 1e-4)
