"""When a packet arrives: one direction of a link, as arithmetic. No clock is read here."""

from __future__ import annotations

import random

from moaspec.remote.emulation.emulated_link import LinkProfile

COHERENT_S = 0.1
"""How long one draw of the delay holds where jitter is coherent."""


APART_S = 1e-6
"""Packets in order arrive at least so far apart."""


class Pacer:
    """One direction of a link.

    Args:
        link: what it does.
        seed: of losses and delays.
    """

    def __init__(self, link: LinkProfile, seed: int = 0) -> None:
        self.link = link
        self._random = random.Random(seed)  # noqa: S311 - an emulation, nothing secret
        self._free_at = 0.0
        self._last = 0.0
        self._window, self._window_delay = -1, 0.0

    def arrival(self, now: float, num_bytes: int) -> float | None:
        """Seconds on the caller's clock at which a packet arrives; None where it is lost.

        Args:
            now: when it is sent; never earlier than in the call before.
            num_bytes: its size on the wire.
        """
        sent = max(now, self._free_at)
        if self.link.bits_per_s and sent - now > self.link.queue_s:
            return None
        if self.link.bits_per_s:
            sent += 8 * num_bytes / self.link.bits_per_s
        # A packet that is lost on its way has taken its turn nevertheless.
        self._free_at = sent
        if self.link.loss and self._random.random() < self.link.loss:
            return None
        arrives = sent + self._delay(sent)
        if self.link.jitter != "reorder":
            # A little later, so that equal times do not leave the order to chance.
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
