"""Draft policies: how many tokens each request drafts in each round.

Each request has its own policy, or a fixed shape. `AdaptivePolicy` drafts as many tokens as pay for
their cost on this machine, and none where plain decoding is faster.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Literal, Protocol

from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.drafting.tree_shapes import PricedTree, parse_shape
from moaspec_core.errors import InputError
from moaspec_core.policy.cost_model import (
    GAIN,
    PRIOR,
    CostTable,
    FadingRate,
    KnownCosts,
    RoundCosts,
)
from moaspec_core.policy.observed_times import NEIGHBOURS, ObservedTimes
from moaspec_core.sampling.params import GREEDY, SamplingParams

MAX_LOSS = 0.015
"""Most time that drafting without success may cost a request, as a share of plain decoding. We
promise 3%: what decides also takes time, and costs are known to some per cent."""

LEAST_SPEEDUP = 1.0  # of a request's rounds with drafts; below it the request pauses

CREDIT_TOKENS = 64
"""A request may always lose the time to encode its prompt plus `MAX_LOSS` of plain decoding this
many tokens, however few it has written."""

FIRST_GAIN = 0.3  # tokens that a round with drafts is taken to gain, before any is counted
FIRST_ROUNDS = 4.0  # weight of `FIRST_GAIN` and of the prior speed-up `GAIN`, in rounds

FIRST_PAUSE, LONGEST_PAUSE = 8, 256
"""Plain rounds before the first probe, and the most: each probe without gain doubles them."""

FIRST_WINDOW, LEAST_WINDOW = 32, 8
"""Last tokens of a prompt that are encoded with it: the former, or fewer, down to the latter, where
that takes longer than plain decoding of `CREDIT_TOKENS` times `MAX_LOSS`. First drafts are as good
with 32 tokens of a prompt as with all of it ("How much of a prompt", lab/log/performance.md)."""

PROVEN_ROUNDS, WIDER_GAIN = 8, 0.03
"""The whole of the drafter's window is encoded after this number of rounds with drafts, if drafts
gained more than that costs and it takes less than this share of plain decoding the rest of the
text."""

LATE_TOKENS = 32  # tokens that are typically encoded together after a pause

NEVER = 2**30
"""Rounds to pause if encoding alone costs more than a request may lose."""

COPIES = Tree(5, 2, 8)
"""Free branches if their cost is unknown: with the newest token and a small tree of drafts they
fill a pass of 16 tokens, which GPUs and CPUs with packed weights compute as fast as one token."""

FreeBranches = Literal["auto"] | bool


class DraftPolicy(Protocol):
    """Decides what one request drafts in each round.

    Attributes:
        window: most tokens before the end of the text to encode now; 0 for the drafter's window.
        times: observed times of rounds, shared by the requests of an engine; None: the policy does
            not go by the clock.
        round_s: seconds of this request's share of the latest round, by the cost table: as a plain
            round, and as it was. Zeros where they are unknown.
        wants_copies: whether the request may verify n-gram branches.
    """

    window: int = 0
    times: ObservedTimes | None = None
    round_s: tuple[float, float] = (0.0, 0.0)

    @property
    def wants_copies(self) -> bool:
        return True

    def begin(self, unread: int, room: int, num_requests: int, *, length: int, window: int) -> None:
        """Called before the prompt's pass.

        Args:
            unread: tokens of the prompt that drafts would need encoded.
            room: most tokens that may be written after the prompt.
            num_requests: requests that are decoded together from then on, if none joins or ends.
            length: tokens of the prompt.
            window: the drafter's, the most tokens that are ever encoded together; 0: no limit.
        """
        del unread, room, num_requests, length, window  # by default there is no decision

    def rests(self) -> bool:
        """Whether a request alone neither drafts nor copies next; `shape` is not called.

        The look-up of copies and the shape together take a hundredth of a small target's pass.
        """
        return False

    def shape(self, length: int, num_requests: int, copied: float) -> Tree | None:
        """The shape of the next drafts; None for a round without drafts.

        Args:
            length: tokens of the request, prompt included.
            num_requests: requests that take part in the round.
            copied: tokens that n-gram branches alone promise beyond their price.
        """
        ...

    @property
    def wants_features(self) -> bool:
        """Whether the next round may draft: then the tokens verified now must be encoded."""
        ...

    def record_round(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Called after the round with its drafts and accepted nodes."""
        ...


@dataclass(frozen=True)
class DraftSettings:
    """Draft settings of one call; makes a policy for each of its requests.

    Raises:
        ShapeError: a text that is no shape.
        InputError: a value of another type.
    """

    tree: Tree | str | None = "auto"  # a shape, "auto", or None for no drafts
    free_branches: FreeBranches = "auto"  # see `generate`
    # "auto" decides by these costs. Without them "auto" is `DEFAULT_TREE` without free branches;
    # see `shaping_for` (`generation/shaping.py`).
    costs: CostTable | None = None
    prior: Sequence[Sequence[float]] = PRIOR  # acceptance rates that "auto" starts from
    # Whether the drafter can draft while the newest tokens are not encoded; see `AdaptivePolicy`.
    lags: bool = False
    # N that the drafter uses with these settings; None takes its default.
    num_target_layers: int | None = None
    beside: Callable[[], int] = lambda: 1  # see `AdaptivePolicy`
    times: ObservedTimes | None = None  # see `KnownCosts`; None: the clock decides nothing

    def __post_init__(self) -> None:
        if not isinstance(self.tree, Tree | str | None):
            raise InputError(f'tree must be "auto", Tree(...) or Chain(...), got {self.tree!r}.')
        if self.free_branches not in ("auto", True, False):
            raise InputError(
                f'free_branches must be True, False or "auto", got {self.free_branches!r}.'
            )
        self.policy()

    def policy(self, sampling: SamplingParams = GREEDY) -> Tree | DraftPolicy | None:
        """A new request's drafts: a fixed shape, a policy, or None for no drafts.

        Args:
            sampling: of the request; a choice by all logits costs more than an argmax.
        """
        if self._shared_costs is not None:
            known = self._shared_costs[sampling.needs_logits]
            return AdaptivePolicy(known, lags=self.lags, beside=self.beside)
        return parse_shape(self.tree) if isinstance(self.tree, str) else self.tree

    def branches(self, sampling: SamplingParams = GREEDY) -> Tree | KnownCosts | None:
        """A new request's n-gram branches: a shape, costs to choose by, or none.

        Args:
            sampling: as for `policy`.
        """
        if self.free_branches == "auto":
            known = self._shared_costs
            return None if known is None else known[sampling.needs_logits]
        return COPIES if self.free_branches else None

    @cached_property
    def _shared_costs(self) -> tuple[KnownCosts, KnownCosts] | None:
        """Costs that requests share: of greedy ones, and of those whose choice needs all logits."""
        if self.tree != "auto" or self.costs is None:
            return None
        tables = self.costs, self.costs.with_logits
        greedy, sampled = (KnownCosts(table, self.prior, self.times) for table in tables)
        return greedy, sampled


class AdaptivePolicy:
    """Drafts as many tokens as pay for their cost on this machine, or none.

    Seconds are those of the cost table; where `KnownCosts` has observed times, what drafts add to
    plain rounds is corrected by them. A request has these rules:

    - Size: a draft is kept if its probability, which the drafter estimates, outweighs its cost. So
      the tree (`PricedTree`) differs from round to round.
    - Copies: if an n-gram branch promises more than rounds with drafts have gained on average, it
      is verified alone and the drafter does not run.
    - Pauses: if rounds with drafts emit fewer tokens per second than plain rounds would, the
      request pauses. Single rounds, at growing intervals, probe whether drafting pays again.
    - Comparison: where times are observed, single rounds are plain (`ObservedTimes.plain_now`).
    - Limit: a request loses at most `MAX_LOSS` of plain decoding its tokens so far, or, if that is
      more, the encoding of its prompt plus `MAX_LOSS` of `CREDIT_TOKENS` tokens. A round that could
      exceed the limit gets a smaller tree or no drafts. A request beyond it copies nothing either.
    - Prompt: at most its last `FIRST_WINDOW` tokens are encoded, the rest of the window when
      drafts have paid and much text is to come (`PROVEN_ROUNDS`). If even the former takes longer
      than the request may lose, it is encoded only for a text whose expected gain is larger.
    - Encoding: a paused request is not encoded, because that alone could exceed the limit. It
      probes with the features that it has, if its drafter can. Missing tokens are encoded when
      a probe shows that drafting pays again.
    - Other requests: beside them no loss is allowed. A request drafts and is encoded only if
      `KnownCosts` expects a gain for this number of them. Missing tokens are encoded when fewer
      are left and the rest of the text is expected to gain more than that costs.

    The drafter must cut trees by their probabilities, as `TreeProposer` does. A drafter that always
    drafts a whole `PricedTree` makes rounds far too large.

    Args:
        costs: of this machine, target and drafter, shared with other requests.
        lags: whether the drafter can draft while the newest tokens are not encoded.
        beside: least number of requests in a pass, if passes have requests of other engines.

    Attributes:
        plain_s: seconds, by the cost table, of plain decoding of the tokens so far.
    """

    wants_features = True

    def __init__(
        self, costs: KnownCosts, *, lags: bool = False, beside: Callable[[], int] = lambda: 1
    ) -> None:
        self._costs, self._lags, self._beside, self.times = costs, lags, beside, costs.times
        self._round: RoundCosts | None = None
        self._drafting: PricedTree | None = None
        self._pause, self._waiting, self._behind = FIRST_PAUSE, 0, False
        self._rested = False  # in the latest round
        self._unencoded, self._room, self._left_out = 0, 0, False
        self.window, self._whole_window = _first_window(costs.table), 0
        self._first, self._num_drafted = 0, 0  # first encoded token of a prompt, drafted rounds
        # Tokens of rounds with drafts, divided by those of plain decoding in the same time.
        self._speedup = FadingRate(GAIN, FIRST_ROUNDS)
        self._gain = FadingRate(FIRST_GAIN, FIRST_ROUNDS)  # tokens of such a round over its price
        # By the table, before `KnownCosts.excess`: what drafts and encodings have cost beyond plain
        # rounds, and how much of it prompts did.
        self._spent_s = self._prompt_s = 0.0
        # Plain rounds that were saved, and those of all tokens.
        self._saved_s = self.plain_s = 0.0

    @property
    def lost_s(self) -> float:
        """Seconds that drafts and encodings have cost beyond plain decoding; negative: a gain."""
        return self._costs.excess * self._spent_s - self._saved_s

    @property
    def wants_copies(self) -> bool:
        return self.times is None or self._round is None or self._allowed_loss_s(self._round) > 0

    def begin(self, unread: int, room: int, num_requests: int, *, length: int, window: int) -> None:
        table, num_requests = self._costs.table, max(num_requests, self._beside())
        self._behind, self._room, self._unencoded = False, room, unread
        costs, plain_s = self._costs.at(length, num_requests), table.plain_s(length, num_requests)
        pays = self.wants_features = self._pays(costs, plain_s, num_requests)
        self._left_out = num_requests > 1 and not pays
        self._waiting = 0 if pays or self._left_out else NEVER
        self._whole_window, self._first = window, 0
        if pays:
            if self.window == unread < min(window, length):
                self._first = length - unread
            encoding_s, self._unencoded = float(table.accept_s(unread)), 0
            self._prompt_s += encoding_s
            self._spent_s += encoding_s

    def rests(self) -> bool:
        # The last rounds of a pause are compared with drafts after them, and have tokens encoded.
        alone = not self._left_out and self._beside() == 1
        self._rested = alone and self._waiting > NEIGHBOURS and not self.wants_copies
        if self._rested:
            self._waiting -= 1
            self._drafting, self.wants_features = None, False
        return self._rested

    def shape(self, length: int, num_requests: int, copied: float = 0.0) -> Tree | None:
        self._drafting, num_requests = None, max(num_requests, self._beside())
        if self.times is not None:
            self._round = self._costs.at(length, num_requests)
            if self.times.plain_now:
                return None
        if num_requests > 1 or self._left_out:
            costs = self._round = self._costs.at(length, num_requests)
            was_left_out = self._left_out
            self._left_out = not self._pays(costs, costs.plain_s, num_requests)
            if self._left_out or (was_left_out and not self._waiting):
                # The missing tokens are encoded after this round, for drafts from the next one on.
                self.wants_features = not self._left_out
                if self.wants_features:
                    self._prompt_s += costs.accept_s(self._unencoded) / costs.excess
                return None
        if self._waiting:
            self._waiting -= 1
        else:
            costs = self._round = self._costs.at(length, num_requests)
            if copied <= max(0.0, self._gain.value):
                self._drafting = self._affordable(costs)
                if self._drafting is None:
                    self._pause_for(costs, self._rounds_until_affordable(costs))
        self.wants_features = not self._waiting and not self._behind
        if self.wants_features and self._first and self._num_drafted >= PROVEN_ROUNDS:
            self._encode_whole_window(length)
        return self._drafting

    def _encode_whole_window(self, length: int) -> None:
        """Have the whole window encoded after this round, if that pays."""
        costs = self._round
        assert costs is not None, "there were rounds with drafts"
        encoding_s = costs.accept_s(min(self._whole_window, length))
        if 2 * (length - self._first) >= self._whole_window:
            self._first = 0  # the verifier goes on from half a window
        elif encoding_s < min(-self.lost_s, WIDER_GAIN * self._room * costs.plain_s):
            self.window, self._first, self._unencoded = 0, 0, length - 1

    def _pays(self, costs: RoundCosts, plain_s: float, num_requests: int) -> bool:
        """Whether the expected gain exceeds the missing encoding, or it may be lost alone."""
        if num_requests > 1 and costs.speedup <= 1.0:  # asked for every request in every round
            return False
        encoding_s = 0.0
        if self._unencoded:
            encoding_s = self._costs.excess * float(self._costs.table.accept_s(self._unencoded))
        if num_requests == 1 and encoding_s <= MAX_LOSS * (self._room + CREDIT_TOKENS) * plain_s:
            return True
        return encoding_s <= self._room * plain_s * (1.0 - 1.0 / costs.speedup)

    def record_round(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        costs = self._round
        self.round_s = 0.0, 0.0
        if costs is None:
            return
        if self._rested:
            self.plain_s += costs.plain_s
            self._count_unencoded(1)
            return
        own = len(tree.tokens) - tree.num_copied
        emitted = 1 + sum(node < own for node in accepted)
        self.plain_s += costs.plain_s * (1 + len(accepted))
        self._count_unencoded(1 + len(accepted))
        encoding_s = 0.0
        if self.wants_features:
            encoding_s, self._unencoded = costs.accept_s(self._unencoded), 0
        round_s = own_s = costs.plain_s
        if self._drafting is not None:
            levels = tree.levels or max(tree.depths[:own], default=1)
            round_s = own_s = costs.drafted_s(levels, tree.num_expanded, own)
        round_s += costs.pass_s(len(tree.tokens)) - costs.pass_s(own)
        added_s = (round_s - costs.plain_s) / costs.excess
        self._spent_s += added_s + encoding_s / costs.excess + self._costs.table.decide_s
        self._saved_s += costs.plain_s * len(accepted)
        if added_s > 0:  # the encoding after a plain round is not a part of its time
            added_s += encoding_s / costs.excess
        if (
            self._drafting is None or self._num_drafted
        ):  # a request's first drafts also read its text
            self.round_s = costs.plain_s, costs.plain_s + added_s
        if self._drafting is not None:
            own_s += costs.accept_s(emitted)
            self._num_drafted += 1
            self._schedule(costs, emitted, own_s / costs.plain_s)

    def _count_unencoded(self, emitted: int) -> None:
        self._room -= emitted
        self._unencoded += emitted
        if self._whole_window:
            most = min(self.window or self._whole_window, self._whole_window)
            self._unencoded = min(self._unencoded, most)

    def _affordable(self, costs: RoundCosts) -> PricedTree | None:
        """The tree, cut until the request may lose all its drafts; None if not even one."""
        left_s = self._allowed_loss_s(costs)
        cut: PricedTree | None = costs.tree
        while cut is not None and costs.risk_s(cut) > left_s:
            cut = cut.halved()
        return cut

    def _allowed_loss_s(self, costs: RoundCosts) -> float:
        """Seconds that the request may still lose."""
        at_first_s = self._costs.excess * self._prompt_s + MAX_LOSS * CREDIT_TOKENS * costs.plain_s
        return max(at_first_s, MAX_LOSS * self.plain_s) - self.lost_s

    def _rounds_until_affordable(self, costs: RoundCosts) -> int:
        """Plain rounds until the request may lose one draft."""
        risk_s = costs.risk_s(replace(costs.tree, depth=1, total_tokens=1))
        missing_s = risk_s + self.lost_s - MAX_LOSS * self.plain_s
        gain_s = self._loss_gain_s(costs)
        return max(1, ceil(missing_s / gain_s)) if gain_s > 0 else NEVER

    def _loss_gain_s(self, costs: RoundCosts) -> float:
        """Seconds that a plain round adds to the allowed loss, less the encoding of its token.

        A drafter that `lags` need not encode this token.
        """
        encoding_s = 0.0 if self._lags else costs.accept_s(LATE_TOKENS) / LATE_TOKENS
        return MAX_LOSS * costs.plain_s - encoding_s

    def _schedule(self, costs: RoundCosts, emitted: int, plain_rounds: float) -> None:
        """After drafts: go on if they pay or nearly do, else pause, longer each time.

        Args:
            plain_rounds: number of plain rounds that take the same time.
        """
        self._speedup.count(emitted, plain_rounds)
        self._gain.count(emitted - 1.0 - GAIN * (plain_rounds - 1.0), 1.0)
        if self._speedup.value > LEAST_SPEEDUP:
            self._pause = FIRST_PAUSE
            if self._behind:
                self._behind = costs.accept_s(self._unencoded) > self._allowed_loss_s(costs)
            return
        self._pause_for(costs, self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _pause_for(self, costs: RoundCosts, rounds: int) -> None:
        """Pause drafting for `rounds` rounds, or forever if encoding those costs too much."""
        self._waiting = rounds if self._loss_gain_s(costs) > 0 else NEVER
        self._behind = self._lags


def _first_window(table: CostTable) -> int:
    """Tokens of a prompt that are encoded with it."""
    window, credit_s = FIRST_WINDOW, MAX_LOSS * CREDIT_TOKENS * table.plain_s(1)
    while window >= 2 * LEAST_WINDOW and table.accept_s(window) > credit_s:
        window //= 2
    return window
