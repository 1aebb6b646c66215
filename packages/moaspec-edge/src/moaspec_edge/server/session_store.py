"""All sessions of a server: how many each owner may have, and which is evicted first."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from moaspec_core.engine.position_rules import PositionRules
from moaspec_core.errors import MoaSpecError, RefusedError
from moaspec_edge.server.auth import ANONYMOUS
from moaspec_edge.server.server_session import OnText, ServerSession
from moaspec_edge.server.shared_verifier import SharedVerifier

BURST_S = 5.0
"""Seconds over which `RateLimit` takes averages."""


class NoRoomError(MoaSpecError):
    """No further session fits now; the device may try again."""


class ForeignSessionError(MoaSpecError):
    """A session of that name belongs to other credentials."""


BUSY_S = 5.0
"""Seconds of idle time after which a session without connection may be evicted: its device connects
again within a few of them after a short cut."""

CONNECTED_BUSY_S = 60.0
"""The same of a session with connection; its device can open it again from the token ids."""


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Limits of the number of sessions.

    Attributes:
        max_sessions: of all devices.
        max_sessions_per_owner: of one device's or tenant's credentials, including texts that the
            server decodes alone. None: half of `max_sessions`, or all of them for `ANONYMOUS`.
        shares: the same for single owners.
        idle_s: seconds after which an idle session without connection is removed.
    """

    max_sessions: int = 64
    max_sessions_per_owner: int | None = None
    shares: Mapping[str, int] = field(default_factory=dict)
    idle_s: float = 300.0

    def share_of(self, owner: str) -> int:
        """Number of texts that an owner may have."""
        most = self.shares.get(owner, self.max_sessions_per_owner)
        if most is not None:
            return most
        return self.max_sessions if owner == ANONYMOUS else max(1, self.max_sessions // 2)

    def connections_of(self, owner: str) -> int:
        """Number of connections that an owner may have: a cut leaves a dead one behind.

        More devices may be connected than have sessions, because idle sessions are evicted.
        """
        most = self.shares.get(owner, self.max_sessions_per_owner)
        return 2 * (max(64, self.share_of(owner)) if most is None else most)


class SessionStore:
    """Sessions by name.

    Args:
        shared: leases rows to sessions, and to texts that the server decodes alone.
    """

    def __init__(self, options: StoreOptions, shared: SharedVerifier, rules: PositionRules) -> None:
        self._options, self._shared, self._rules = options, shared, rules
        self._sessions: dict[bytes, ServerSession] = {}
        self.on_text: OnText | None = None
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[ServerSession]:
        return iter(list(self._sessions.values()))

    def find(self, name: bytes, owner: str) -> ServerSession | None:
        """Find a session of this owner; ForeignSessionError for another's: names are random."""
        session = self._sessions.get(name)
        if session is not None and session.owner != owner:
            raise ForeignSessionError("This session belongs to other credentials.")
        return session

    def create(self, name: bytes, owner: str) -> ServerSession:
        """Create a session; NoRoomError where there are too many and none of them is idle."""
        own = self._shared.rows_of(owner)
        if own >= self._options.share_of(owner) and not self._evict(owner):
            raise NoRoomError(f"These credentials have {own} texts, all of them in use.")
        rows = self._shared.num_rows
        if rows >= self._options.max_sessions and not self._evict(None):
            raise NoRoomError(f"All {rows} texts of this server are in use.")
        session = ServerSession(name, owner, self._shared.lease(owner), self._shared, self._rules)
        session.on_text = self.on_text
        self._sessions[name] = session
        return session

    def remove(self, session: ServerSession) -> None:
        if self._sessions.get(session.name) is session:
            del self._sessions[session.name]
            session.offer_text()
            session.close()

    def sweep(self) -> None:
        """Remove sessions without connection that were idle for too long."""
        for session in self._idle(self._options.idle_s, connected=False):
            self._forget(session)

    def _evict(self, owner: str | None) -> bool:
        """Evict the session that was idle longest, preferably one without connection."""
        for seconds, connected in ((BUSY_S, False), (CONNECTED_BUSY_S, True)):
            idle = self._idle(seconds, connected=connected)
            own = [session for session in idle if owner in (None, session.owner)]
            if own:
                self._forget(min(own, key=lambda session: session.used_s))
                return True
        return False

    def _forget(self, session: ServerSession) -> None:
        self.evicted += 1
        self.remove(session)

    def _idle(self, seconds: float, *, connected: bool) -> list[ServerSession]:
        before = time.monotonic() - seconds
        return [
            session
            for session in self
            if session.used_s < before
            and (session.stream is not None) == connected
            and session.task is None
        ]


class RateLimit:
    """Limits the messages of a connection.

    Args:
        per_s: number per second, on average over `BURST_S`.
    """

    def __init__(self, per_s: float) -> None:
        self._per_s, self._full = per_s, per_s * BURST_S
        self._left, self._last_s = self._full, time.monotonic()

    def take(self) -> None:
        """Count a message; RefusedError where the rate is exceeded."""
        now = time.monotonic()
        self._left = min(self._full, self._left + (now - self._last_s) * self._per_s) - 1
        self._last_s = now
        if self._left < 0:
            raise RefusedError(f"More than {self._per_s:g} messages a second.")


class Quota:
    """Limits how much of a resource each owner has at the same time.

    Args:
        most: the limit of an owner.
        what: name of the resource in the plural, for messages.
    """

    def __init__(self, most: Callable[[str], int], what: str) -> None:
        self._most, self._what = most, what
        self._counts: Counter[str] = Counter()

    @contextmanager
    def one(self, owner: str) -> Iterator[None]:
        """Hold one unit; NoRoomError where the owner has as many as it may have."""
        most = self._most(owner)
        if self._counts[owner] >= most:
            raise NoRoomError(f"These credentials have {most} {self._what}; try again later.")
        self._counts[owner] += 1
        try:
            yield
        finally:
            self._counts[owner] -= 1
            # Remove zeros, so that the table does not grow with past owners.
            self._counts += Counter()
