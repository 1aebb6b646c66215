"""The choice between steps with drafts and steps without, by the measured time of each.

A pass takes longer with more tokens, and drafts pay where it takes little longer. All requests of
a step are drafted for, or none: a pass in which all requests have equally many tokens runs in one
CUDA graph, and a mixed one does not. Times are measured when vLLM starts, and each step corrects
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

PROMISE = 1.04  # least expected speed-up of a step with drafts over one without
HORIZON = 64
"""Expected number of further tokens of a request. The cost of encoding its earlier tokens is spread
over them."""
PRIOR_DRAFTS = 8.0  # weight of the first guess, in drafts, in the mean of accepted tokens
CAUTION = 0.5
"""The first guess as a part of the recorded rate: users' prompts had 0.3 to 0.4 for a recorded
0.65, and drafts that do not pay cost more than missed ones."""
LEARN, RETURN = 0.02, 0.001
"""Least weight of a draft in the mean of accepted tokens, and weight of the first guess in a step
without drafts: drafts that did not pay are tried again some hundred steps later."""
NEWEST = 0.1  # weight of the newest time in a running mean
LONGEST = 2.0  # largest excess of a step over the table that counts; longer ones were interrupted
PROBE = 64  # steps with drafts, after which one without drafts is timed
REFRESH = 8  # steps until new times apply, and until drafts are considered again
PLAIN, DRAFTED = 0, 1  # the two kinds of steps, as indices

Share = Callable[[list[float]], list[float]]
"""Replaces each rank's numbers by those of the first tensor-parallel rank, so all decide alike."""


@dataclass(frozen=True, kw_only=True)
class MeasuredSteps:
    """Seconds of steps by number of requests, measured at start.

    Attributes:
        sizes: numbers of requests, ascending from 1.
        plain_s: of a step without drafts, one for each size.
        drafted_s: of a step that verifies a draft of each request, encodes and drafts again.
        token_s: of encoding one token of many.
    """

    sizes: tuple[int, ...]
    plain_s: tuple[float, ...]
    drafted_s: tuple[float, ...]
    token_s: float

    def table_s(self, most: int) -> np.ndarray:
        """Seconds for 0 to `most` requests, interpolated and never falling: (2, most + 1)."""
        numbers = np.arange(most + 1.0)
        rows = [_line(numbers, self.sizes, one) for one in (self.plain_s, self.drafted_s)]
        return np.maximum.accumulate(np.stack(rows), axis=1)


def _line(numbers: np.ndarray, sizes: tuple[int, ...], seconds: tuple[float, ...]) -> np.ndarray:
    """Linear between the sizes, and on by the last slope."""
    between = np.interp(numbers, sizes, seconds)
    if len(sizes) == 1:
        return between * np.maximum(1.0, numbers / sizes[0])
    slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    return between + max(0.0, slope) * (numbers - sizes[-1]).clip(min=0)


class StepTimes:
    """Seconds of steps, of both kinds.

    That is the time at start plus an excess (attention, vLLM's work for each request) that steps of
    this kind with similar numbers of requests had.

    Args:
        measured: times at start.
        max_requests: most requests of a step.
        share: see `Share`.
    """

    def __init__(self, measured: MeasuredSteps, *, max_requests: int, share: Share) -> None:
        self.token_s, self._share = measured.token_s, share
        self._table_s = measured.table_s(max_requests)
        # Excess over the table in seconds, by kind and power of two of requests.
        self._more_s = np.zeros((2, max_requests.bit_length()))
        self._num_seen = np.zeros_like(self._more_s)
        # Of the first rank, as of the latest `refresh`; never this rank's own.
        self._applied_s = np.zeros_like(self._more_s)
        self._since = 0

    def count(self, kind: int, num_requests: int, seconds: float) -> None:
        """Count a step that only decoded, from the beginning of its pass to the next one's."""
        place = kind, num_requests.bit_length() - 1
        known_s = self._table_s[kind, num_requests]
        more_s = min(seconds - known_s, LONGEST * known_s)
        self._num_seen[place] += 1
        weight = max(NEWEST, 1.0 / self._num_seen[place])
        self._more_s[place] += weight * (more_s - self._more_s[place])
        self._since += 1
        if self._since >= REFRESH:
            self.refresh()

    def refresh(self) -> None:
        """Apply the times counted since the last call, on all ranks those of the first rank."""
        numbers = np.array(self._share([*self._more_s.ravel(), *self._num_seen.ravel()]))
        more_s, seen = numbers.reshape(2, *self._more_s.shape)
        self._applied_s = more_s.copy()
        for kind, level in zip(*np.nonzero(seen == 0), strict=True):
            # Unknown: as for the other kind, or as for another number of requests.
            near = np.flatnonzero(seen[kind])
            if seen[1 - kind, level]:
                self._applied_s[kind, level] = more_s[1 - kind, level]
            elif len(near):
                self._applied_s[kind, level] = more_s[kind, near[np.abs(near - level).argmin()]]
        self._since = 0

    def seconds(self, kind: int, num_requests: int) -> float:
        level = num_requests.bit_length() - 1
        known_s = float(self._table_s[kind, num_requests])
        return max(0.1 * known_s, known_s + float(self._applied_s[kind, level]))


class LoadAwareDrafts:
    """Chooses between drafts for all requests and none by tokens per second.

    Args:
        times: of both kinds of steps.
        length: of the drafts.
        rate: share of drafted tokens that are right, as the drafter's training recorded it.
    """

    def __init__(self, times: StepTimes, *, length: int, rate: float) -> None:
        self.times, self._length = times, length
        guess = CAUTION * rate
        self._first = self.accepted = sum(guess**place for place in range(1, length + 1))
        self._num_drafts = PRIOR_DRAFTS
        self._idle_steps = self._idle_load = self._busy_steps = 0

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts that a step verified, and their accepted tokens."""
        if not num_drafts:
            return
        self._num_drafts += num_drafts
        weight = max(1.0 - (1.0 - LEARN) ** num_drafts, num_drafts / self._num_drafts)
        self.accepted += weight * (num_accepted / num_drafts - self.accepted)

    def choose(self, num_requests: int, backlog: int) -> bool:
        """Whether the next step drafts.

        Args:
            num_requests: requests of the next step.
            backlog: number of their tokens that have to be encoded first.
        """
        usual = round(num_requests * (1 + self.accepted))
        extra_s = max(0, backlog - usual) * self.times.token_s / HORIZON
        drafted_s = self.times.seconds(DRAFTED, num_requests) + extra_s
        gain = (1 + self.accepted) * self.times.seconds(PLAIN, num_requests) / drafted_s
        if gain < PROMISE:
            self._idle_load, self._idle_steps = num_requests.bit_length(), 0
            return False
        self._idle_load = 0
        self._busy_steps += 1
        return self._busy_steps % PROBE != 0

    def rests(self, num_requests: int) -> bool:
        """Whether this step skips drafts, because a recent step with the same load did."""
        if num_requests.bit_length() != self._idle_load:
            return False
        self._idle_steps += 1
        self.accepted += RETURN * (self._first - self.accepted)
        return self._idle_steps % REFRESH != 0
