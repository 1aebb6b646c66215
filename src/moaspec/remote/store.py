"""All sessions of a server: who may have one, and which is evicted when there is no room."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moaspec.errors import MoaSpecError
from moaspec.remote.sessions import ServerSession


class NoRoomError(MoaSpecError):
    """There is no room for another session now; the device may try again."""


class ForeignSessionError(MoaSpecError):
    """A session of that name belongs to other credentials."""


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """How many sessions there may be.

    Attributes:
        max_sessions: of all devices.
        max_sessions_per_owner: of one device's or tenant's credentials.
        idle_s: a session without connection is forgotten after so long.
        busy_s: one that was used more recently is not evicted to make room for another.
    """

    max_sessions: int = 64
    max_sessions_per_owner: int = 64
    idle_s: float = 300.0
    busy_s: float = 5.0


class SessionStore:
    """Sessions by name.

    Args:
        options: how many.
        make: a new session for a name and an owner.
        drop: lets go of what a session holds.
    """

    def __init__(
        self,
        options: StoreOptions,
        *,
        make: Callable[[bytes, str], ServerSession],
        drop: Callable[[ServerSession], None],
    ) -> None:
        self._options, self._make, self._drop = options, make, drop
        self._sessions: dict[bytes, ServerSession] = {}
        self.attached: set[bytes] = set()
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
        own = Counter(session.owner for session in self)[owner]
        if own >= self._options.max_sessions_per_owner and not self._evict(owner):
            raise NoRoomError(f"These credentials have {own} sessions, all of them in use.")
        if len(self) >= self._options.max_sessions and not self._evict(None):
            raise NoRoomError(f"All {len(self)} sessions of this server are in use.")
        session = self._sessions[name] = self._make(name, owner)
        return session

    def remove(self, session: ServerSession) -> None:
        """Forget a session and free what it holds."""
        if self._sessions.get(session.name) is session:
            del self._sessions[session.name]
            self.attached.discard(session.name)
            self._drop(session)

    def sweep(self) -> None:
        """Forget sessions that nobody is connected to and that were idle for too long."""
        for session in self._idle(self._options.idle_s):
            self._forget(session)

    def _evict(self, owner: str | None) -> bool:
        """Make room for one: the session that was idle longest, of one owner or of all."""
        idle = [s for s in self._idle(self._options.busy_s) if owner in (None, s.owner)]
        if not idle:
            return False
        self._forget(min(idle, key=lambda session: session.used_s))
        return True

    def _forget(self, session: ServerSession) -> None:
        self.evicted += 1
        self.remove(session)

    def _idle(self, seconds: float) -> list[ServerSession]:
        before = time.monotonic() - seconds
        return [s for s in self if s.name not in self.attached and s.used_s < before]
