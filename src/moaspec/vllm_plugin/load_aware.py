"""Draft lengths by the number of requests and the speed of earlier steps.

A step takes from one call of the proposer to the next: the drafts of a batch, their verification
and vLLM's scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TRIALS, PROBES = 8, 4  # steps of a length's first trial, and of each later probe
FIRST_PAUSE, LONGEST_PAUSE = 64, 1024
"""Steps until the other lengths are probed; probes that change nothing double it, up to the
latter."""
MEMORY = 0.9  # what a measured step counts one such step later


class LoadAwareLength:
    """Chooses the draft length of each step: the one with most tokens per second at this load.

    Loads are numbers of requests, up to a factor of two alike. A step counts for the length that
    was drafted before it if all of its requests decode and were there before: not if a prompt is
    read, a request has joined or ended, or vLLM had nothing to do.

    Args:
        longest: the longest draft, which is tried first; then one token, then none.
    """

    def __init__(self, longest: int) -> None:
        self._choices = sorted({0, 1, longest}, reverse=True)
        self._loads: dict[int, _Load] = {}
        self._length, self._since_s, self._before = longest, 0.0, list[int]()

    def choose(self, lengths: Sequence[int], emitted: Sequence[int], now_s: float) -> int:
        """The length to draft now.

        Args:
            lengths: tokens of each request, with the newly emitted ones.
            emitted: how many these are; 0 while a prompt is read.
            now_s: the time, in seconds of any clock.
        """
        load = self._loads.setdefault(len(lengths).bit_length(), _Load(self._choices))
        began = [length - new for length, new in zip(lengths, emitted, strict=True)]
        if all(emitted) and began == self._before:
            load.speeds[self._length].count(sum(emitted), now_s - self._since_s)
        self._length, self._since_s, self._before = load.choose(), now_s, list(lengths)
        return self._length


@dataclass
class _Speed:
    """Tokens and seconds of recent steps with one length."""

    tokens: float = 0.0
    seconds: float = 0.0
    steps: int = 0

    def count(self, tokens: int, seconds: float) -> None:
        """Take in one step."""
        self.tokens = MEMORY * self.tokens + tokens
        self.seconds = MEMORY * self.seconds + seconds
        self.steps += 1


class _Load:
    """The speeds of all lengths for about one number of requests."""

    def __init__(self, choices: Sequence[int]) -> None:
        self.speeds = {choice: _Speed() for choice in choices}
        self._best, self._pause, self._left = -1, FIRST_PAUSE, FIRST_PAUSE

    def choose(self) -> int:
        """The length with most tokens per second, or the next length to try."""
        for choice, speed in self.speeds.items():
            if speed.steps < TRIALS:
                return choice
        best = max(self.speeds, key=lambda one: self.speeds[one].tokens / self.speeds[one].seconds)
        if best != self._best:
            self._best, self._pause, self._left = best, FIRST_PAUSE, FIRST_PAUSE
        self._left -= 1
        if self._left < 0:
            self._pause = self._left = min(2 * self._pause, LONGEST_PAUSE)
            for choice, speed in self.speeds.items():
                speed.steps = TRIALS if choice == best else TRIALS - PROBES
        return best
