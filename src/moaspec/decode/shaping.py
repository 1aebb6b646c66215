"""Who decides, round by round, what a row drafts.

Each row has a policy of its own. `FixedShape` always answers the same; `CostShape` weighs what the
row's drafts have brought so far against what rounds cost here, and turns drafting off where plain
decoding is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal, Protocol

import numpy as np

from moaspec.decode.cost import (
    MEMORY,
    PRIOR,
    PRIOR_ROUNDS,
    Acceptance,
    Choice,
    CostTable,
    Prospect,
)
from moaspec.decode.tree import AUTO, Chain, DraftTree, Tree, parse_shape
from moaspec.errors import InputError

TOLERATED_LOSS = 0.03
"""Share of plain decoding's time that drafting may cost a row where it brings nothing."""

CREDIT_TOKENS = 64
"""Tokens whose share of that a row may lose before it has written any."""

DECIDE_EVERY = 8
"""Rounds between two decisions: counts move slowly, and a decision takes about a millisecond."""

FIRST_PAUSE, LONGEST_PAUSE = 8, 256
"""Plain rounds before the first probe; each probe in vain doubles them, up to the latter."""

LATE_TOKENS = 32
"""Tokens that are typically encoded together after a pause."""

NEVER = 2**30
"""Rounds until drafting is affordable where encoding alone costs more than is tolerated."""

COPY_SHAPES = (Chain(3), Tree(5, 2, 8), Tree(8, 2, 14))
"""Free branches to choose from."""

COPIES = Tree(5, 2, 8)
"""Free branches where nothing is known of their cost: with the newest token and a small tree of
drafts they fill a pass of 16, which GPUs and CPUs with packed weights make at the price of one."""

FreeBranches = Literal["auto"] | bool


class ShapePolicy(Protocol):
    """What one row drafts. Asked once before every round, told the outcome after it."""

    def begin(self, unread: int, room: int) -> None:
        """A prompt is about to be read.

        Args:
            unread: tokens of it whose activations would have to be encoded for drafts.
            room: tokens that may be written after it.
        """
        ...

    def shape(self, length: int, num_rows: int) -> Tree | None:
        """The shape of the next drafts, None for a round without.

        Args:
            length: tokens of the row, prompt included.
            num_rows: rows that take part in the round.
        """
        ...

    @property
    def wants_features(self) -> bool:
        """Whether the next round may draft, so that what this one verifies must be encoded."""
        ...

    def observe(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """What was drafted after `shape`, and which nodes the target chose."""
        ...


@dataclass(frozen=True)
class Shaping:
    """How the rows of one call decide what to draft; makes a policy for each.

    Attributes:
        tree: a shape, or "auto".
        free_branches: see `generate`.
        costs: of this machine, or None where it was not measured; then "auto" is a fixed shape
            without free branches.
        prior: acceptance rates that "auto" starts from.

    Raises:
        ShapeError: a text that is no shape.
        InputError: something else than the types say.
    """

    tree: Tree | str = "auto"
    free_branches: FreeBranches = "auto"
    costs: CostTable | None = None
    prior: Sequence[Sequence[float]] = PRIOR

    def __post_init__(self) -> None:
        if not isinstance(self.tree, Tree | str):
            raise InputError(f'tree must be "auto", Tree(...) or Chain(...), got {self.tree!r}.')
        if self.free_branches not in ("auto", True, False):
            raise InputError(
                f'free_branches must be True, False or "auto", got {self.free_branches!r}.'
            )
        self.policy()

    def policy(self) -> ShapePolicy:
        """A new row's drafts."""
        if self.tree == "auto" and self.costs is not None:
            return CostShape(self.costs, self.prior)
        return FixedShape(parse_shape(self.tree) if isinstance(self.tree, str) else self.tree)

    def branches(self) -> ShapePolicy | None:
        """A new row's free branches."""
        if self.free_branches == "auto":
            return CostBranches(self.costs) if self.tree == "auto" and self.costs else None
        return FixedShape(COPIES) if self.free_branches else None


@dataclass(frozen=True)
class FixedShape:
    """Always the same shape; None never drafts."""

    tree: Tree | None = AUTO

    def begin(self, _unread: int, _room: int) -> None:
        """Nothing to decide."""

    @property
    def wants_features(self) -> bool:
        """See `ShapePolicy`."""
        return self.tree is not None

    def shape(self, _length: int, _num_rows: int) -> Tree | None:
        """The shape."""
        return self.tree

    def observe(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Nothing to learn."""


class CostShape:
    """Drafts what promises the most tokens per second, or nothing.

    A row never owes more than `TOLERATED_LOSS` of what plain decoding would have taken for its
    tokens (and for `CREDIT_TOKENS` in advance), all in the cost table's seconds: a round that could
    break this is put off until enough plain rounds have been made. Where no shape promises
    anything, single rounds probe at growing intervals, so that a text which becomes easier is
    noticed. What encoding the prompt takes is no part of the debt; a prompt for which that is
    more than the row may lose is encoded only where drafts promise to gain it back, and else its
    row never drafts.

    Args:
        costs: of this machine, target and drafter.
        prior: acceptance rates by depth and rank to start from.

    Attributes:
        lost_s: seconds, by the cost table, that drafting has cost beyond plain decoding so far;
            negative where it has gained.
        plain_s: seconds, by the cost table, of plain decoding of the tokens so far.
    """

    def __init__(self, costs: CostTable, prior: Sequence[Sequence[float]] = PRIOR) -> None:
        self._costs, self._acceptance = costs, Acceptance(prior)
        self._prospect: Prospect | None = None
        self._choice: Choice | None = None
        self._drafting: Tree | None = None
        self._pause, self._waiting, self._unencoded, self._drafted = FIRST_PAUSE, 0, 0, 0
        self.lost_s = self.plain_s = 0.0

    def begin(self, unread: int, room: int) -> None:
        """See `ShapePolicy`."""
        prospect = Prospect(self._costs, self._acceptance.rates, unread)
        written_s = room * prospect.plain_s
        gain_s = written_s * (1.0 - 1.0 / prospect.best().speedup)
        tolerated_s = TOLERATED_LOSS * (written_s + CREDIT_TOKENS * prospect.plain_s)
        if float(self._costs.accept_s(unread)) > max(gain_s, tolerated_s):
            self._waiting = NEVER

    @property
    def wants_features(self) -> bool:
        """See `ShapePolicy`."""
        return self._waiting == 0

    def shape(self, length: int, num_rows: int) -> Tree | None:
        """See `ShapePolicy`."""
        self._drafting = None
        if self._waiting:
            self._waiting -= 1
            return None
        prospect, choice = self._decide(length, num_rows)
        self._waiting = self._rounds_until_affordable(prospect, choice)
        if not self._waiting:
            self._drafting = choice.shape
        return self._drafting

    def observe(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """See `ShapePolicy`."""
        if self._prospect is None:
            return
        own = len(tree.tokens) - tree.num_copied
        emitted = 1 + sum(node < own for node in accepted)
        plain_s = self._prospect.plain_s
        self.plain_s += plain_s * emitted
        self._unencoded += 1 + len(accepted)
        if self._drafting is not None:
            self._acceptance.count(tree, accepted)
            self.lost_s += self._prospect.drafted_s(self._drafting, own) - plain_s * emitted
            self._schedule()
        if self.wants_features:
            self.lost_s += float(self._costs.accept_s(self._unencoded))
            self._unencoded = 0

    def _decide(self, length: int, num_rows: int) -> tuple[Prospect, Choice]:
        """The best shape, found anew every few rounds with drafts."""
        last = self._prospect
        if self._choice is None or last is None or last.num_rows != num_rows:
            self._prospect = Prospect(self._costs, self._acceptance.rates, length, num_rows)
            self._choice = self._prospect.best()
        elif self._drafted % DECIDE_EVERY == 0 or self._choice.speedup <= 1.0:
            self._prospect = replace(last, rates_DR=self._acceptance.rates, context=length)
            self._choice = self._prospect.best()
        assert self._prospect is not None
        return self._prospect, self._choice

    def _rounds_until_affordable(self, prospect: Prospect, choice: Choice) -> int:
        """Plain rounds to make before one whose drafts may all be rejected; 0: it may be now."""
        risk_s = prospect.drafted_s(choice.shape, choice.shape.total_tokens) - prospect.plain_s
        credit_s = TOLERATED_LOSS * (self.plain_s + CREDIT_TOKENS * prospect.plain_s)
        missing_s = self.lost_s + risk_s + float(self._costs.accept_s(1)) - credit_s
        if missing_s <= 0:
            return 0
        gain_s = self._earned_s(prospect)
        return ceil(missing_s / gain_s) if gain_s > 0 else NEVER

    def _earned_s(self, prospect: Prospect) -> float:
        """What a plain round adds to the credit, less the encoding that it puts off."""
        late_s = float(self._costs.accept_s(LATE_TOKENS)) / LATE_TOKENS
        return TOLERATED_LOSS * prospect.plain_s - late_s

    def _schedule(self) -> None:
        """After drafts: go on where the shape promised to pay, else pause, longer each time."""
        self._drafted += 1
        assert self._choice is not None
        if self._choice.speedup > 1.0:
            self._pause = FIRST_PAUSE
            return
        assert self._prospect is not None
        self._waiting = self._pause if self._earned_s(self._prospect) > 0 else NEVER
        self._pause = min(2 * self._pause, LONGEST_PAUSE)


class CostBranches:
    """Free branches as long as what they have brought pays for the wider pass.

    Only rounds in which the text repeats itself cost anything: where no stretch of it recurs, there
    is no branch to verify. Counts fade with every round, so what was once given up is tried again.

    Args:
        costs: of this machine.
    """

    wants_features = False

    def __init__(self, costs: CostTable) -> None:
        self._costs = costs
        # How often the first copied token of a round was right, and each one after a right one.
        self._first, self._next = _Rate(0.25), _Rate(0.6)
        self._drafted = 0

    def begin(self, _unread: int, _room: int) -> None:
        """Nothing to decide."""

    def shape(self, length: int, num_rows: int) -> Tree | None:
        """See `ShapePolicy`."""
        gains = {None: 0.0} | {s: self._gain(s, length, num_rows) for s in COPY_SHAPES}
        return max(gains, key=lambda shape: gains[shape])

    def observe(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """See `ShapePolicy`."""
        self._drafted = len(tree.tokens) - tree.num_copied
        copied = sum(node >= self._drafted for node in accepted)
        self._first.count(min(copied, 1), min(tree.num_copied, 1))
        self._next.count(max(copied - 1, 0), copied)

    def _gain(self, shape: Tree, length: int, num_rows: int) -> float:
        """Seconds that a round with such branches is expected to save."""
        wide = self._costs.verify_s(
            num_rows * np.array([1.0 + self._drafted, 1.0 + self._drafted + shape.total_tokens]),
            length,
        )
        first, further = self._first.value, self._next.value
        copied = sum(first * further**level for level in range(shape.depth))
        saved_s = copied * self._costs.plain_s(length, num_rows)
        return saved_s - float(wide[1] - wide[0]) / num_rows


class _Rate:
    """A share that starts from an expectation and follows what is counted."""

    def __init__(self, expected: float) -> None:
        self._expected, self._hits, self._trials = expected, 0.0, 0.0

    @property
    def value(self) -> float:
        return (PRIOR_ROUNDS * self._expected + self._hits) / (PRIOR_ROUNDS + self._trials)

    def count(self, hits: int, trials: int) -> None:
        """Take in one round; with no trials, earlier ones still fade."""
        self._hits, self._trials = MEMORY * self._hits + hits, MEMORY * self._trials + trials
