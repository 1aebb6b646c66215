"""What the next step contains: which texts, and how much of each.

Owners (API keys, devices, requests without a key) take turns by the work that they were served:
the least served owner comes first, and an owner that is ahead waits. Prompts are read in chunks, so
that a step stays short. Nothing here reads a clock or draws a random number.

Source: Sheng et al., *Fairness in Serving Large Language Models* (arXiv 2401.00588), algorithm 2;
here the work is seconds of the target instead of weighted tokens.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

STEP_S = 0.15
"""Seconds that a step lasts at most while another owner may wait."""

READING_STEPS = 3
"""Steps with prompts of an owner alone in which its other texts decode once: rounds of few texts
cost nearly as much as those of the whole batch."""

MIN_CHUNK = 64
"""Least tokens of a chunk, unless a prompt has fewer. Kernels read shorter chunks at a lower speed,
as each one reads all weights."""

CONTEXT_OF_DOUBLE = 4096
"""Assumed length of a text at which a token costs twice what it costs in a short one."""

MEMORY = 0.98
"""Weight of a measured pass one pass later."""

ASSUMED = 0.1
"""Weight of the assumed costs, in measured passes."""
FLOOR = ASSUMED * (1 - MEMORY)
"""Of it, what a pass gives back, so that the weight stays."""

PAIRS = tuple((i, j) for i in range(3) for j in range(i + 1))
"""Of the three parts of a pass's time."""

FIT_EVERY = 16
"""Passes from one fit to the next, after the first ones: it takes a hundredth of a small pass."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one text needs next."""

    key: int  # texts that came earlier have lower ones
    owner: str = ""
    unread: int = 0  # tokens to read before it decodes; 0: it decodes
    context: int = 0  # tokens that the cache holds
    priority: int = 0  # among the owner's texts the lowest comes first
    whole: bool = False  # whether it must be read in one pass
    ready: bool = True  # False: it waits for room, and its owner keeps its turn


class PassCosts:
    """Seconds of a pass: a fixed part, a part for each token, and one for each token it looks back.

    They are fitted to measured passes by least squares of relative errors; newer passes weigh more.

    Args:
        tokens: assumed to take `seconds`.
        fixed: tokens that are assumed to take as long as the fixed part.
    """

    def __init__(self, tokens: int, seconds: float, fixed: int) -> None:
        token_s = seconds / (tokens + fixed)
        self._assumed = (fixed * token_s, token_s, token_s / CONTEXT_OF_DOUBLE)
        # Of the shares that the parts would have in each pass: products of pairs, and sums.
        self._products = [ASSUMED if i == j else 0.0 for i, j in PAIRS]
        self._sums = [ASSUMED] * 3
        self._parts = self._assumed
        self._num_passes = 0

    def record(self, tokens: int, context: float, seconds: float) -> None:
        """Record a pass.

        Args:
            context: mean number of tokens that each looks back at.
        """
        if seconds <= 0 or not tokens:
            return
        numbers = (1.0, tokens, tokens * context)
        shares = [part * n / seconds for part, n in zip(self._assumed, numbers, strict=True)]
        self._products = [
            MEMORY * old + shares[i] * shares[j] + (FLOOR if i == j else 0.0)
            for (i, j), old in zip(PAIRS, self._products, strict=True)
        ]
        self._sums = [
            MEMORY * old + own + FLOOR for old, own in zip(self._sums, shares, strict=True)
        ]
        self._num_passes += 1
        if self._num_passes < FIT_EVERY or self._num_passes % FIT_EVERY == 0:
            self._fit()

    def _fit(self) -> None:
        products = np.empty((3, 3))
        for (i, j), product in zip(PAIRS, self._products, strict=True):
            products[i, j] = products[j, i] = product
        factors = np.linalg.solve(products, self._sums).tolist()
        fixed, token, look = (
            part * max(factor, 0.01) for part, factor in zip(self._assumed, factors, strict=True)
        )
        self._parts = (fixed, token, look)

    @property
    def fixed_s(self) -> float:
        return self._parts[0]

    def token_s(self, context: float) -> float:
        """Seconds of one more token."""
        return self._parts[1] + context * self._parts[2]

    def seconds(self, tokens: int, context: float) -> float:
        return self.fixed_s + tokens * self.token_s(context)

    def tokens_within(self, seconds: float, context: int) -> int:
        """Tokens of one text, after `context` others, that a pass of `seconds` reads."""
        # n tokens look back at context + n / 2 tokens each: a n + b n^2 = seconds.
        a, b = self.token_s(context), self._parts[2] / 2
        left = max(0.0, seconds - self.fixed_s)
        return int(2 * left / (a + (a * a + 4 * b * left) ** 0.5))


class Scheduler:
    """Chooses the contents of each step.

    Args:
        prompt_tokens: tokens of prompts that are assumed to take `STEP_S`; without `step_s`, as
            many are read in a step while texts decode.
        step_s: seconds of a step; None where nobody else can wait: then prompts are read whole
            while nothing decodes.

    Attributes:
        served: seconds of work that each owner was served. An owner that returns starts from those
            of the least served one, so that nobody saves turns for later.
    """

    def __init__(self, prompt_tokens: int, step_s: float | None = STEP_S) -> None:
        self._prompt_tokens, self.step_s = prompt_tokens, step_s
        assumed = min(prompt_tokens, 1 << 16)
        self.reading = PassCosts(assumed, STEP_S, fixed=16)
        self.rounds = PassCosts(assumed, STEP_S, fixed=16)
        self.served: dict[str, float] = {}
        self._present: set[str] = set()
        self._least = 0.0
        self._steps = 0
        self._next_round = 0  # when texts of an owner alone next decode beside its prompts
        self._last: dict[int, int] = {}  # by key, the latest step that it took part in

    @property
    def is_shared(self) -> bool:
        """Whether anybody else waits, or steps are short because somebody may."""
        return self.step_s is not None or len(self._present) > 1

    def next_step(self, work: Sequence[Work]) -> dict[int, int]:
        """By key, the tokens to read of a prompt, and 1 for a text that decodes.

        At least one text takes part, if one is ready.
        """
        self._arrive({one.owner for one in work})
        self._steps += 1
        keys = {one.key for one in work}
        self._last = {key: step for key, step in self._last.items() if key in keys}
        by_owner: defaultdict[str, list[Work]] = defaultdict(list)
        for one in sorted(work, key=lambda one: (one.priority, one.key)):
            if one.ready:
                by_owner[one.owner].append(one)
        if not by_owner:
            return {}
        if len({one.owner for one in work}) == 1:
            taken = self._all_of(*by_owner.values())
        else:
            taken = self._in_turn(by_owner)
        self._last.update(dict.fromkeys(taken, self._steps))
        return taken

    def turns(self, owners: Sequence[str]) -> list[str]:
        """All owners that wait, in the order in which a pass takes their requests.

        Owners that are ahead come last; else the order given stays. This is for passes that have
        limits of their own: room that is left in one is used.
        """
        self._arrive(set(owners))
        first = self._whose_turn(owners)
        return sorted(owners, key=lambda owner: owner not in first)

    def served_of(self, owner: str) -> float:
        """Seconds of work that an owner was served, or would start from."""
        return self.served.get(owner, self._least)

    def charge(
        self, costs: PassCosts, tokens: Mapping[str, int], context: float, rows: int | None = None
    ) -> None:
        """Charge a pass to its owners: they share its fixed part, and the rest by their tokens.

        What it should cost counts, and not its own time, which other processes make longer.

        Args:
            costs: `reading` or `rounds`, where the pass was recorded.
            context: mean number of tokens that each looks back at.
            rows: of a round, what `costs` counts; None: tokens.
        """
        total = sum(tokens.values())
        rest_s = (total if rows is None else rows) * costs.token_s(context)
        for owner, own in tokens.items():
            part = costs.fixed_s / len(tokens) + rest_s * own / total
            self.served[owner] = self.served_of(owner) + part

    def charge_seconds(self, owner: str, seconds: float) -> None:
        """Charge an owner for work that is its own, such as masks of a grammar."""
        self.served[owner] = self.served_of(owner) + seconds

    def _arrive(self, owners: set[str]) -> None:
        """Lift the counters of owners that come or return."""
        staying = [self.served[owner] for owner in owners & self._present]
        least = min(staying, default=self._least)
        for owner in owners - self._present:
            self.served[owner] = max(self.served.get(owner, 0.0), least)
        self._present = owners
        if owners:
            self._least = min(self.served[owner] for owner in owners)
            # An owner below the least served one would be lifted anyway.
            self.served = {
                owner: seconds
                for owner, seconds in self.served.items()
                if owner in owners or seconds > self._least
            }

    def _all_of(self, work: Sequence[Work]) -> dict[int, int]:
        """The step of an owner alone: all rounds, and a step's time of prompts."""
        taken = {one.key: 1 for one in work if not one.unread}
        if self.step_s is not None:
            read = self._read(work, self.step_s, inf)[0]
            if read and self._steps < self._next_round:
                return read
            self._next_round = self._steps + READING_STEPS
            return taken | read
        most = left = self._prompt_tokens if taken else sys.maxsize
        chunked = False
        for one in work:
            if one.whole or one.unread <= most:
                left -= one.unread
                taken |= {one.key: one.unread} if one.unread and left >= 0 else {}
            elif not chunked:
                chunked, taken[one.key] = True, most
        return taken

    def _in_turn(self, by_owner: Mapping[str, list[Work]]) -> dict[int, int]:
        """The step of several owners: equal parts for the least served."""
        step_s = STEP_S if self.step_s is None else self.step_s
        taken: dict[int, int] = {}
        left_s = step_s
        first = self._whose_turn([*by_owner])
        for owner in first:
            share_s = max(0.0, min(left_s, step_s / len(by_owner)))
            own, spent_s = self._part(by_owner[owner], share_s, left_s if taken else inf)
            taken |= own
            left_s -= spent_s
        if any(not one.unread and one.key in taken for owner in first for one in by_owner[owner]):
            taken |= self._beside(by_owner, first, left_s)
        return taken

    def _beside(
        self, by_owner: Mapping[str, list[Work]], first: Sequence[str], left_s: float
    ) -> dict[int, int]:
        """One text of each owner that is a little ahead, to share the round of those before.

        It is served no more than they are, and a round of its own later would cost far more.
        """
        taken: dict[int, int] = {}
        least = min(map(self.served_of, first))
        for owner in sorted((one for one in by_owner if one not in first), key=self.served_of):
            texts = [one for one in by_owner[owner] if not one.unread]
            if not texts or self.served_of(owner) > least + STEP_S / 2:
                continue
            one = min(texts, key=lambda one: (one.priority, self._last.get(one.key, 0)))
            left_s -= self.rounds.token_s(one.context)
            if left_s < 0:
                break
            taken[one.key] = 1
        return taken

    def _whose_turn(self, owners: Sequence[str]) -> list[str]:
        """The least served owner, and those after it that differ little.

        These share passes, which saves the fixed part.
        """
        order = sorted(owners, key=self.served_of)  # stable: of equal ones in the order given
        ahead_s = max(STEP_S / 16, self.rounds.seconds(1, 0))
        least = min(map(self.served_of, owners), default=0.0)
        return [owner for owner in order if self.served_of(owner) <= least + ahead_s]

    def _part(
        self, work: Sequence[Work], share_s: float, most_s: float
    ) -> tuple[dict[int, int], float]:
        """One owner's part of a step, and its expected seconds.

        It is about `share_s`, or one round of a text: to batch another row costs little.

        Args:
            most_s: what a shortest chunk may take.
        """
        taken: dict[int, int] = {}
        spent_s, reads = 0.0, any(one.unread for one in work)
        rounds_s = share_s / 2 if reads else share_s
        for one in sorted(work, key=lambda one: (one.priority, self._last.get(one.key, 0))):
            if one.unread:
                continue
            row_s = self.rounds.token_s(one.context)
            if taken and spent_s + row_s > rounds_s:
                break
            taken[one.key] = 1
            spent_s += row_s
        if reads:
            read, read_s = self._read(work, share_s - spent_s, most_s - spent_s)
            taken, spent_s = taken | read, spent_s + read_s
        return taken, spent_s

    def _read(
        self, work: Sequence[Work], budget_s: float, most_s: float
    ) -> tuple[dict[int, int], float]:
        """Prompts in order, as many tokens as the time allows, and its expected seconds."""
        taken: dict[int, int] = {}
        spent_s = 0.0
        for one in work:
            if not one.unread:
                continue
            room = self.reading.tokens_within(budget_s - spent_s, one.context)
            if taken and room < min(one.unread, MIN_CHUNK):
                break
            size = one.unread if one.whole else min(one.unread, max(room, MIN_CHUNK))
            seconds = self.reading.seconds(size, one.context)
            if spent_s + seconds > max(budget_s, most_s):
                break
            taken[one.key] = size
            spent_s += seconds
        return taken, spent_s
