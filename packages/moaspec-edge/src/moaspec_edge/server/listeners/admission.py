"""Admission of calls: who calls, how many at once, how long."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from moaspec_core.support import limits
from moaspec_core.support.tasks import RefusalDelay, time_limit
from moaspec_edge.server.auth import ANONYMOUS, CallAuth, UnknownClientError
from moaspec_edge.server.session_store import Quota
from moaspec_edge.server.telemetry import Telemetry

MAX_CALLS = 256
"""Calls with valid credentials at the same time, four times as many as sessions by default; one
client may have half of them. Clients without credentials are identified by address."""


class Admission:
    """Limits calls before their requests are read."""

    def __init__(self, guard: CallAuth, observer: Telemetry) -> None:
        self._guard, self._observer = guard, observer
        self._slow = RefusalDelay()
        self._all = Quota(lambda _: MAX_CALLS, "calls, all clients together")
        self._own = Quota(lambda _: MAX_CALLS // 2, "calls")

    @asynccontextmanager
    async def call(self, bearer: str | None, peer: str | None, address: str) -> AsyncIterator[str]:
        """Admit a call, and yield the owner of its credentials.

        Args:
            peer: name in the client's certificate, if TLS has verified one.
            address: of the client, without the port.

        Raises:
            UnknownClientError: wrong credentials; raised late, which slows down guessing.
            NoRoomError: too many calls at the same time.
            LinkError: the call has lasted for too long.
        """
        try:
            owner = self._guard.owner(bearer, peer)
        except UnknownClientError:
            self._observer.refused("credentials")
            await self._slow.wait()
            raise
        client = address if owner == ANONYMOUS else owner
        with self._own.one(client), self._all.one(""):
            seconds = limits.MAX_CONNECTION_S
            message = f"A connection lasts at most {seconds:g} s; connect again."
            async with time_limit(seconds, message):
                yield owner


def request_deadline() -> AbstractAsyncContextManager[None]:
    """Limit the time until a call's request is here; LinkError if it is not."""
    seconds = limits.MAX_REQUEST_S
    return time_limit(seconds, f"The request did not arrive within {seconds} s.")
