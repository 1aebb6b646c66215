"""All sessions of a server: how many each owner may have, and which is evicted first."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moaspec.errors import MoaSpecError, RefusedError
from moaspec.remote.server.auth import ANONYMOUS
from moaspec.remote.server.server_session import ServerSession

if TYPE_CHECKING:
    from moaspec.remote.server.service import TargetService


class NoRoomError(MoaSpecError):
    """There is no room for another session now; the device may try again."""


class ForeignSessionError(MoaSpecError):
    """A session of that name belongs to other credentials."""


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """How many sessions there may be.

    Attributes:
        max_sessions: of all devices.
        max_sessions_per_owner: of one device's or tenant's credentials, texts that the server
            decodes alone included. None: half of all; all of them for `ANONYMOUS`.
        idle_s: a session without connection is forgotten after so long.
        busy_s: a session without connection that was used more recently is not evicted to make
            room for another.
        connected_busy_s: the same for one whose device is connected; it is opened again from its
            token ids when the device goes on.
    """

    max_sessions: int = 64
    max_sessions_per_owner: int | None = None
    idle_s: float = 300.0
    busy_s: float = 5.0
    connected_busy_s: float = 60.0

    def share_of(self, owner: str) -> int:
        """Texts that an owner may have."""
        if self.max_sessions_per_owner is not None:
            return self.max_sessions_per_owner
        return self.max_sessions if owner == ANONYMOUS else max(1, self.max_sessions // 2)

    def connections_of(self, owner: str) -> int:
        """Connections that an owner may have; a cut leaves one behind that nobody uses any more.

        More devices may be connected than have sessions: an idle one's makes room.
        """
        most = self.max_sessions_per_owner
        return 2 * (max(64, self.share_of(owner)) if most is None else most)


class SessionStore:
    """Sessions by name.

    Args:
        options: how many there may be.
        service: makes and drops sessions, and knows which are in use.
    """

    def __init__(self, options: StoreOptions, service: TargetService) -> None:
        self._options, self._service = options, service
        self._sessions: dict[bytes, ServerSession] = {}
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[ServerSession]:
        return iter(list(self._sessions.values()))

    def find(self, name: bytes, owner: str) -> ServerSession | None:
        """A session that this owner has.

        Raises:
            ForeignSessionError: it is another's. Names are random, so nobody meets this by chance.
        """
        session = self._sessions.get(name)
        if session is not None and session.owner != owner:
            raise ForeignSessionError("This session belongs to other credentials.")
        return session

    def create(self, name: bytes, owner: str) -> ServerSession:
        """A new session.

        Raises:
            NoRoomError: too many, and none of them idle.
        """
        own = self._service.rows_of(owner)
        if own >= self._options.share_of(owner) and not self._evict(owner):
            raise NoRoomError(f"These credentials have {own} texts, all of them in use.")
        if self._service.num_rows >= self._options.max_sessions and not self._evict(None):
            raise NoRoomError(f"All {self._service.num_rows} texts of this server are in use.")
        session = self._sessions[name] = self._service.make(name, owner)
        return session

    def remove(self, session: ServerSession) -> None:
        """Forget a session and free what it holds."""
        if self._sessions.get(session.name) is session:
            del self._sessions[session.name]
            self._service.drop(session)

    def sweep(self) -> None:
        """Forget sessions that nobody is connected to and that were idle for too long."""
        for session in self._idle(self._options.idle_s, connected=False):
            self._forget(session)

    def _evict(self, owner: str | None) -> bool:
        """Make room for one: the session idle longest, rather one that nobody is connected to."""
        options = self._options
        for seconds, connected in ((options.busy_s, False), (options.connected_busy_s, True)):
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
        service, before = self._service, time.monotonic() - seconds
        return [
            session
            for session in self
            if session.used_s < before
            and service.is_connected(session) == connected
            and not service.is_working(session)
        ]


class RateLimit:
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
