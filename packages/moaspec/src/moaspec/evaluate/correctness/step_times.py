"""The remaining time of work whose steps are of several kinds."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean


class StepTimes:
    """Times steps. A step of a kind takes as long as those of this kind took on average.

    Args:
        steps: number of steps of each kind.
    """

    def __init__(
        self, steps: Mapping[str, int], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._remaining, self._clock = Counter(steps), clock
        self._times_s: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def step(self, kind: str) -> Iterator[None]:
        """Time the block as a step of this kind."""
        start_s = self._clock()
        yield
        self._times_s[kind].append(self._clock() - start_s)
        self._remaining[kind] -= 1

    @property
    def left_s(self) -> float | None:
        """Seconds that the rest takes; None before a step of each remaining kind was timed."""
        remaining = +self._remaining
        if not remaining.keys() <= self._times_s.keys():
            return None
        return sum(number * fmean(self._times_s[kind]) for kind, number in remaining.items())
