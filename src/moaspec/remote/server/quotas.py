"""How much one device, and one owner's devices together, may ask for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from moaspec.errors import RefusedError
from moaspec.remote.server.session_store import NoRoomError


class Allowance:
    """How many messages a connection may still send.

    Args:
        per_s: on average.
        burst_s: over so many seconds.
    """

    def __init__(self, per_s: float, burst_s: float) -> None:
        self._per_s, self._full = per_s, per_s * burst_s
        self._left, self._last_s = self._full, time.monotonic()

    def take(self) -> None:
        """Count a message.

        Raises:
            RefusedError: one too many.
        """
        now = time.monotonic()
        self._left = min(self._full, self._left + (now - self._last_s) * self._per_s) - 1
        self._last_s = now
        if self._left < 0:
            raise RefusedError(f"More than {self._per_s:g} messages a second.")


class Quota:
    """How many of something each owner has at the same time.

    Args:
        most: of an owner.
        what: they are, in the plural.
    """

    def __init__(self, most: Callable[[str], int], what: str) -> None:
        self._most, self._what = most, what
        self._counts: Counter[str] = Counter()

    @contextmanager
    def one(self, owner: str) -> Iterator[None]:
        """Have one of them.

        Raises:
            NoRoomError: one too many; the device may try again.
        """
        most = self._most(owner)
        if self._counts[owner] >= most:
            raise NoRoomError(f"These credentials have {most} {self._what}; try again later.")
        self._counts[owner] += 1
        try:
            yield
        finally:
            self._counts[owner] -= 1
            # What is 0 is forgotten, so that the table does not grow with the owners of the past.
            self._counts += Counter()
