"""Arrival times of packets in one direction of a link. No clock is read here."""

from __future__ import annotations

import random

from moaspec.remote.emulation.emulated_link import LinkProfile

COHERENT_S = 0.1
"""Time for which a coherent delay is constant."""

APART_S = 1e-6
"""Least time between packets that arrive in order."""


class Pacer:
    """One direction of a link.

    Args:
        link: parameters of the link.
        seed: of losses and delays.
    """

    def __init__(self, link: LinkProfile, seed: int = 0) -> None:
        self.link = link
        self._random = random.Random(seed)  # noqa: S311 - an emulation, nothing secret
        self._free_at = 0.0
        self._last = 0.0
        self._window, self._window_delay = -1, 0.0

    def arrival(self, now: float, num_bytes: int) -> float | None:
        """Time at which a packet arrives, on the caller's clock; None if it is lost.

        Args:
            now: time at which it is sent; must not decrease between calls.
            num_bytes: size on the wire.
        """
        sent = max(now, self._free_at)
        if self.link.bits_per_s and sent - now > self.link.queue_s:
            return None
        if self.link.bits_per_s:
            sent += 8 * num_bytes / self.link.bits_per_s
        # A lost packet has used the link, too.
        self._free_at = sent
        if self.link.loss and self._random.random() < self.link.loss:
            return None
        arrives = sent + self._delay(sent)
        if self.link.jitter != "reorder":
            # Different times keep the order well defined.
            arrives = self._last = max(arrives, self._last + APART_S)
        return arrives

    def _delay(self, at: float) -> float:
        if self.link.jitter != "coherent":
            return self._drawn()
        window = int(at / COHERENT_S)
        if window != self._window:
            self._window, self._window_delay = window, self._drawn()
        return self._window_delay

    def _drawn(self) -> float:
        if not self.link.jitter_s:
            return self.link.delay_s
        return max(0.0, self._random.gauss(self.link.delay_s, self.link.jitter_s))
