"""Events of a device's session, and statistics of its link."""

import time
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from moaspec_core.engine.request_state import Event, Source, StopReason

LinkState = Literal["connecting", "up", "down", "closed"]

_IS_COARSE = time.get_clock_info("monotonic").resolution > 1e-3
"""On Windows before Python 3.13 it moves in steps of 16 ms, longer than a draft step."""


@dataclass(frozen=True, kw_only=True)
class RemoteEvent:
    """A change of the generated text: readers apply `text[start:] = token_ids`.

    Attributes:
        start: index into the generated tokens.
        token_ids: the tokens from `start` on.
        sources: "draft", "target" or "copy" for each token.
        num_provisional: number of tokens at the end that are not verified.
        num_corrected: number of earlier provisional tokens that were removed or changed.
        link: state of the link.
        stop_reason: set on the last event of a turn.
        verified: the engine's event, if a verdict caused this one.
    """

    start: int
    token_ids: tuple[int, ...]
    sources: tuple[Source, ...]
    num_provisional: int = 0
    num_corrected: int = 0
    link: LinkState = "up"
    stop_reason: StopReason | None = None
    verified: Event | None = None


@dataclass(frozen=True)
class RoundTrip:
    """Times and counts of one verdict.

    Attributes:
        sent_s, received_s: `time.monotonic` of the first request and of the verdict.
        pass_s: duration of the server's pass.
        drafted: drafted tokens that the server verified.
        accepted: accepted tokens among them.
        ahead: tokens drafted while the request waited.
        dropped: drafted tokens that the server did not verify.
        repeated: whether the request was sent again, after a cut or because the server was busy.
    """

    sent_s: float
    received_s: float
    pass_s: float
    drafted: int
    accepted: int
    ahead: int
    dropped: int = 0
    repeated: bool = False


NUM_LATEST = 9
"""Number of latest rounds whose times count."""

MAX_WAIT_AGE = 256
"""Rounds after which the wait of a round with drafts no longer counts."""


@dataclass
class LinkStats:
    """Statistics of a session's link.

    Attributes:
        state: current state.
        rtt_s: round trip of heartbeats, smoothed; None before the first.
        bytes_up, bytes_down: of frames, WebSockets' own not counted.
        activation_bytes: of bytes_down, activations.
        cuts: times the link was lost.
        reconnects: times it came back.
        reopened: times the server had forgotten the session.
        provisional: tokens shown without verification.
        corrected: of these, tokens that were taken back or changed.
        ahead_hits, ahead_misses: verdicts on drafts at which the next draft was ready, or was not.
        first_token_s: from the turn's request to its first token.
        noticed_s: silence of the link when the last cut was noticed.
        down_s: `time.monotonic` of that moment.
        up_s: `time.monotonic` of the last connection.
        rounds: one per verdict, the latest 65536; `add_round` adds one.
    """

    state: LinkState = "connecting"
    rtt_s: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    activation_bytes: int = 0
    cuts: int = 0
    reconnects: int = 0
    reopened: int = 0
    provisional: int = 0
    corrected: int = 0
    ahead_hits: int = 0
    ahead_misses: int = 0
    first_token_s: float | None = None
    noticed_s: float | None = None
    down_s: float | None = None
    up_s: float | None = None
    rounds: deque[RoundTrip] = field(default_factory=lambda: deque(maxlen=65536))
    _waits: deque[tuple[float, float] | None] = field(
        default_factory=lambda: deque(maxlen=MAX_WAIT_AGE)
    )

    def add_round(self, one: RoundTrip) -> None:
        self.rounds.append(one)
        wait = one.received_s - one.sent_s, self.rtt_s or 0.0
        counts = (one.drafted or one.dropped) and not one.repeated
        self._waits.append(wait if counts else None)

    @property
    def pass_s(self) -> float | None:
        """Time of the server's latest passes, the lower quartile; None before the first."""
        latest = sorted(one.pass_s for one in islice(reversed(self.rounds), NUM_LATEST))
        return latest[len(latest) // 4] if latest else None

    @property
    def wait_s(self) -> float | None:
        """Time of a verdict on drafts: the median of the latest ones, which ignores outliers.

        Few rounds draft on a slow link, so these may be old. If the round trip of heartbeats has
        become shorter since, the difference is subtracted. Without verdicts on drafts it is that
        round trip plus a pass.
        """
        rtt_s = self.rtt_s or 0.0
        waits = islice(filter(None, reversed(self._waits)), NUM_LATEST)
        if latest := sorted(wait_s - max(0.0, then_s - rtt_s) for wait_s, then_s in waits):
            return latest[len(latest) // 2]
        return None if self.rtt_s is None else rtt_s + (self.pass_s or 0.0)


def now() -> float:
    """The clock of all statistics, which never jumps."""
    return time.perf_counter() if _IS_COARSE else time.monotonic()
