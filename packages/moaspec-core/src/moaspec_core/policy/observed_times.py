"""Compares the measured cost of drafts with that in a cost table.

The cost of drafts is the time that a round takes beyond a plain one.

A busy machine slows all rounds, so only neighbouring rounds are compared: where rounds with drafts
follow a plain one, or the reverse. Nothing here reads a clock; times are arguments.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

COMPARED = 60
"""Newest comparisons that count, each of a round with drafts and a plain one next to it."""

FIRST_COMPARED = 12
"""Comparisons after which plain rounds between those with drafts become rare."""

FIRST_INTERVAL, INTERVAL = 2, 48
"""Rounds with drafts after which plain ones are made to compare them with: at first, and later."""

NEIGHBOURS = 2  # plain rounds that are made then, and rounds before and after that are compared
HIDDEN_COST = 0.2
"""What drafts cost beyond the difference of neighbouring rounds, as a share of it: they displace
weights of the target in the processor's caches, which slows the plain rounds next to them, too.
Measured: 0.19 to 0.3 ("Plain rounds beside drafted ones", lab/log/performance.md)."""

NEAR_S = 2.0  # rounds further apart are not compared: other processes may have come or gone
TRUST = 1.0
"""Weight of the table among comparisons; the weight of each is what its drafts cost by the table,
in plain rounds."""

LEAST_EXCESS, MOST_EXCESS = 0.2, 20.0
MISFIT = 0.2
"""Error of the time of rounds with drafts, in plain rounds, from which a table does not fit."""


@dataclass(frozen=True)
class RoundTime:
    """One round of all requests that decode together."""

    ended_s: float  # by a clock
    seconds: float  # without the encoding of what a plain round verified
    plain_s: float  # of the round without drafts, by the table
    expected_s: float  # of the round with its drafts, by the table; `plain_s` without drafts

    @property
    def drafted(self) -> bool:
        return self.expected_s > self.plain_s

    @property
    def slowness(self) -> float:
        """Its time in plain rounds by the table."""
        return self.seconds / self.plain_s


class ObservedTimes:
    """Compares rounds with drafts and plain rounds of one engine; all its requests share it.

    Only for targets whose passes give the same bits at any width (`same_bits`): there drafts change
    no text, so the clock may decide about them.

    Attributes:
        excess: measured cost of drafts beyond plain rounds, divided by their cost in the table.
        plain_now: whether the round under way is made without drafts, to be compared with.
    """

    def __init__(self) -> None:
        self._compared: deque[tuple[float, float]] = deque(maxlen=COMPARED)
        self._run: deque[RoundTime] = deque(maxlen=NEIGHBOURS)  # newest rounds, all of one kind
        self._before: list[RoundTime] = []  # the rounds of the other kind before them
        self._length = 0  # of the newest run of rounds of one kind
        self.excess, self.plain_now = 1.0, False

    @property
    def fits(self) -> bool:
        """Whether the table is about right, or too little was seen to tell."""
        if len(self._compared) < FIRST_COMPARED:
            return True
        cost = median(cost for _, cost in self._compared)
        return abs(self.excess - 1.0) * cost <= MISFIT

    def begin_round(self, *, shared: bool) -> None:
        """Decide whether the next round is a plain one.

        Args:
            shared: whether all requests of the round have these times; else it is not recorded.
        """
        interval = INTERVAL if len(self._compared) >= FIRST_COMPARED else FIRST_INTERVAL
        drafted = bool(self._run) and self._run[-1].drafted
        due = self._length >= interval if drafted else self._length < NEIGHBOURS
        # Rounds that were plain by themselves need no more of them.
        self.plain_now = shared and due and (drafted or self.plain_now or not self._run)

    def record(self, newest: RoundTime) -> None:
        if newest.plain_s <= 0 or newest.seconds <= 0:
            return
        last = self._run[-1] if self._run else None
        if last is not None and newest.ended_s - newest.seconds - last.ended_s > NEAR_S:
            self._before = []
            self._run.clear()
            self._length = 0
        elif last is not None and last.drafted != newest.drafted:
            self._before = [*self._run]
            self._run.clear()
            self._length = 0
        self._run.append(newest)
        self._length += 1
        if self._before and self._length <= NEIGHBOURS:
            self._compare(newest)

    def _compare(self, newest: RoundTime) -> None:
        """Compare a round with those of the other kind before it."""
        if newest.drafted:
            self._add(newest, fmean(plain.slowness for plain in self._before))
        else:
            for drafted in self._before:
                self._add(drafted, newest.slowness)
        share = [(1.0, TRUST), *((excess / cost, cost) for excess, cost in self._compared)]
        self.excess = min(max(_weighted_median(share), LEAST_EXCESS), MOST_EXCESS)

    def _add(self, drafted: RoundTime, plain_slowness: float) -> None:
        excess = (1.0 + HIDDEN_COST) * (drafted.slowness / plain_slowness - 1.0)
        self._compared.append((excess, drafted.expected_s / drafted.plain_s - 1.0))


def _weighted_median(weighted: Sequence[tuple[float, float]]) -> float:
    """The value below which half of the weights lie."""
    ordered = sorted(weighted)
    left = sum(weight for _, weight in ordered) / 2
    for value, weight in ordered:
        left -= weight
        if left <= 0:
            return value
    return ordered[-1][0]
