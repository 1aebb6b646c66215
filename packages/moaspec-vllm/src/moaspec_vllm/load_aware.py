"""The choice of requests to draft for, and of the draft length, by the measured costs of a step.

A pass takes longer with more tokens, and drafts pay where it takes little longer. Costs are
measured when vLLM starts and corrected by each step; acceptance is counted by request.

Legend: R requests that can be drafted for, most promising first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from moaspec_core.policy.cost_model import CostTable, Floats
from moaspec_vllm.paged_drafter.encoded_tokens import Integers

PROMISE = 1.04  # least expected speed-up of a step with drafts over one without
HORIZON = 64
"""Expected number of further tokens of a request, or fewer by its limit. The cost of encoding its
earlier tokens is spread over them."""
PRIOR_TRIALS = 8.0
"""Weight, in drafted tokens, of the initial rate in the rate of all requests, and of the latter in
each request's own rate."""
CAUTION = 0.5
"""The initial rate as a part of the recorded one: users' prompts had 0.3 to 0.4 for a recorded
0.65, and drafts that do not pay cost more than missed ones."""
MEMORY = 0.95  # weight of a request's drafts at its next draft
LEARN, RETURN = 0.01, 0.001
"""Least weight of a drafted token in the rate of all requests, and weight of the initial rate in a
step without drafts: drafts that did not pay are tried again some hundred steps later."""
NEWEST = 0.1  # weight of the newest time in a running mean
LONGEST = 1.0  # largest excess of a pass over the table that counts; longer ones were interrupted
PROBE = 64  # steps with drafts, after which one without drafts is timed
REFRESH = 8  # steps until new times apply, and until drafts are considered again

Share = Callable[[list[float]], list[float]]
"""Replaces each rank's numbers by those of the first tensor-parallel rank, so all decide alike."""


class StepCosts:
    """Seconds of the parts of a step.

    The time of a pass is that of a pass with this number of tokens at start, plus an excess
    (attention, vLLM's work per request) that steps with similar numbers of requests and drafts had.

    Args:
        measured: times at start.
        max_requests: most requests of a step.
        longest: the longest draft.
        share: see `Share`.

    Attributes:
        rest_s: between two steps.
        draft_s: by depth - 1 and number of requests.
        encode_s: by number of tokens.
    """

    def __init__(
        self, measured: CostTable, *, max_requests: int, longest: int, share: Share
    ) -> None:
        self._share = share
        tokens = np.arange(max_requests * (1 + longest) + 1.0)
        self._table_s = np.maximum.accumulate(np.asarray(measured.verify_s(tokens, 1)))
        self._draft_s = np.array(
            [
                [measured.draft_s(depth, 1, max(1, rows)) for rows in range(max_requests + 1)]
                for depth in range(1, longest + 1)
            ]
        )
        self._encode_s = np.asarray(measured.accept_s(tokens))
        # Excess over the table in seconds, by powers of two of requests and drafts per request.
        self._more_s = np.zeros((max_requests.bit_length(), 1 + longest))
        self._num_seen = np.zeros_like(self._more_s)
        self._draft_ratio = self._encode_ratio = 1.0
        self._rests = list[float]()
        self._since = 0
        self.refresh()

    def count_pass(self, num_requests: int, num_drafts: int, seconds: float, rest_s: float) -> None:
        """Count a step that only decoded; `rest_s`: time since the previous step ended."""
        place = num_requests.bit_length() - 1, -(-num_drafts // num_requests)
        known_s = self._table_s[num_requests + num_drafts]
        more_s = min(seconds - known_s, LONGEST * known_s)
        self._num_seen[place] += 1
        weight = max(NEWEST, 1.0 / self._num_seen[place])
        self._more_s[place] += weight * (more_s - self._more_s[place])
        self._rests = [*self._rests[-31:], rest_s]
        self._since += 1
        if self._since >= REFRESH:
            self.refresh()

    def count_draft(self, depth: int, num_requests: int, seconds: float) -> None:
        expected_s = float(self._draft_s[depth - 1, num_requests])
        self._draft_ratio = _mean(self._draft_ratio, seconds / expected_s)

    def count_encode(self, num_tokens: int, seconds: float) -> None:
        expected_s = num_tokens * self.token_s
        if num_tokens < len(self._encode_s):
            expected_s = float(self._encode_s[num_tokens])
        self._encode_ratio = _mean(self._encode_ratio, seconds / expected_s)

    def refresh(self) -> None:
        """Apply the times counted since the last call, on all ranks those of the first rank."""
        rest_s = median(self._rests) if self._rests else 0.0
        numbers = [rest_s, self._draft_ratio, self._encode_ratio, *self._more_s.flatten().tolist()]
        self.rest_s, draft, encode, *more = self._share(numbers)
        self._pass_more_s = np.reshape(more, self._more_s.shape)
        seen = self._num_seen > 0
        for place, level in zip(*np.nonzero(~seen), strict=True):
            # Unknown: as for other drafts of as many requests, or as for other requests.
            near = (np.flatnonzero(seen[place]), np.flatnonzero(seen[:, level]))
            if len(near[0]):
                other = (place, near[0][np.abs(near[0] - level).argmin()])
            elif len(near[1]):
                other = (near[1][np.abs(near[1] - place).argmin()], level)
            else:
                continue
            self._pass_more_s[place, level] = self._pass_more_s[other]
        self.draft_s, self.encode_s = self._draft_s * draft, self._encode_s * encode
        self._since = 0

    def pass_s(self, num_requests: int, num_drafts: Integers) -> Floats:
        """Seconds of passes with these numbers of drafts."""
        more_s = self._pass_more_s[num_requests.bit_length() - 1]
        levels = -(-num_drafts // num_requests)
        return np.asarray(self._table_s[num_requests + num_drafts] + more_s[levels])

    @property
    def token_s(self) -> float:
        """Seconds of encoding one token of many."""
        return float(self.encode_s[-1]) / (len(self.encode_s) - 1)


def _mean(old: float, new: float) -> float:
    """The running mean. A single step, which anything may interrupt, at most doubles it."""
    return old + NEWEST * (min(new, 2.0 * old) - old)


@dataclass
class _Counts:
    """A request's drafted tokens that were verified, and those of them that were right."""

    trials: float = 0.0
    hits: float = 0.0


@dataclass(frozen=True)
class Plan:
    """Indices of the requests to draft for, and the length of their drafts; 0: none."""

    rows: Sequence[int] = ()
    depth: int = 0


@dataclass(frozen=True)
class Candidate:
    """A request that can be drafted for.

    Attributes:
        row: its index in the batch.
        name: vLLM's id.
        left: number of tokens until its limit.
    """

    row: int
    name: str
    left: int = HORIZON


class LoadAwareDrafts:
    """Chooses the requests to draft for and the length of drafts with most tokens per second.

    Args:
        costs: of the parts of a step.
        longest: the longest draft.
        rate: share of drafted tokens that are right, as the drafter's training recorded it.
    """

    def __init__(self, costs: StepCosts, *, longest: int, rate: float) -> None:
        self.costs, self._longest = costs, longest
        self._first_rate = self._rate = CAUTION * rate
        self._trials = PRIOR_TRIALS
        self._requests = dict[str, _Counts]()
        self._idle_steps = self._idle_load = self._busy_steps = 0

    def count(self, name: str, drafted: int, accepted: int) -> None:
        """Count a request's verified draft."""
        counts = self._requests.setdefault(name, _Counts())
        accepted = min(accepted, drafted)
        trials = min(drafted, accepted + 1)
        counts.trials = MEMORY * counts.trials + trials
        counts.hits = MEMORY * counts.hits + accepted
        for right in (*[True] * accepted, *[False] * (trials - accepted)):
            self._trials += 1
            self._rate += max(LEARN, 1.0 / self._trials) * (right - self._rate)

    def forget(self, names: set[str]) -> None:
        """Drop the counts of all requests but these."""
        if len(self._requests) > 2 * len(names) + 64:
            self._requests = {k: v for k, v in self._requests.items() if k in names}

    def choose(
        self,
        candidates: Sequence[Candidate],
        num_requests: int,
        backlog: Callable[[Candidate], int],
    ) -> Plan:
        """The drafts of this step.

        Args:
            candidates: requests that can be drafted for.
            num_requests: requests of the next step, these and others.
            backlog: number of a request's tokens that have to be encoded before it is drafted for.
        """
        if not candidates:
            return Plan()
        rates = np.array([self._rate_of(candidate.name) for candidate in candidates])
        order = np.argsort(-rates, kind="stable")
        rate_R, free_R = rates[order], np.zeros(len(order))
        depth, number = self._best(rate_R, free_R, num_requests)
        if number:
            extra = [self._extra_s(candidates[i], backlog, depth) for i in order[:number]]
            depth, number = self._best(rate_R[:number], np.array(extra), num_requests)
        if not number:
            self._idle_load, self._idle_steps = num_requests.bit_length(), 0
            return Plan()
        self._idle_load = 0
        self._busy_steps += 1
        if self._busy_steps % PROBE == 0:
            return Plan()
        return Plan([candidates[i].row for i in order[:number]], depth)

    def rests(self, num_requests: int) -> bool:
        """Whether this step skips drafts, because a recent step with the same load did."""
        if num_requests.bit_length() != self._idle_load:
            return False
        self._idle_steps += 1
        self._rate += RETURN * (self._first_rate - self._rate)
        return self._idle_steps % REFRESH != 0

    def _rate_of(self, name: str) -> float:
        counts = self._requests.get(name, _Counts())
        return (PRIOR_TRIALS * self._rate + counts.hits) / (PRIOR_TRIALS + counts.trials)

    def _extra_s(
        self, candidate: Candidate, backlog: Callable[[Candidate], int], depth: int
    ) -> float:
        """Seconds per step that encoding a request's earlier tokens costs."""
        steps = max(1, min(HORIZON, candidate.left))
        return max(0, backlog(candidate) - depth - 1) * self.costs.token_s / steps

    def _best(self, rate_R: Floats, extra_R: Floats, num_requests: int) -> tuple[int, int]:
        """Draft length and number of requests with most tokens per second; (0, 0): no drafts."""
        costs, number_R = self.costs, np.arange(1, len(rate_R) + 1)
        (plain_s,) = costs.rest_s + costs.pass_s(num_requests, np.zeros(1, int))
        best, found = PROMISE * num_requests / plain_s, (0, 0)
        power_R, gain_R = np.ones(len(rate_R)), np.zeros(len(rate_R))
        for depth in range(1, self._longest + 1):
            power_R = power_R * rate_R
            gain_R = gain_R + power_R
            accepted_R = gain_R.cumsum()
            encoded_R = np.minimum(len(costs.encode_s) - 1, number_R + accepted_R).astype(int)
            seconds_R = (
                costs.rest_s
                + costs.pass_s(num_requests, number_R * depth)
                + costs.draft_s[depth - 1, number_R]
                + costs.encode_s[encoded_R]
                + extra_R.cumsum()
            )
            speed_R = (num_requests + accepted_R) / seconds_R
            number = int(speed_R.argmax())
            if speed_R[number] > best:
                best, found = float(speed_R[number]), (depth, number + 1)
        return found
