"""Connections that misbehave, between real sessions and real services."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from moaspec_core.errors import LinkError
from moaspec_edge.device import link
from moaspec_edge.protocol.transport import Connection, InProcessTransport, Transport
from moaspec_edge.server.service import TargetService


@contextmanager
def patient_link() -> Iterator[None]:
    """A busy machine that is silent for a second is no dead link.

    For real connections; sessions with a server in the same event loop need no patience in
    simulated time, see `run_simulated`.
    """
    with patch.multiple(link, DEAD_AFTER_S=60.0, CONNECT_S=60.0):
        yield


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What becomes of frames, in both directions.

    Attributes:
        loss, twice: share of frames that vanish, or come twice.
        delay_s: frames take up to so long, so that later ones overtake them.
        cut_after: frames that each connection carries before it breaks; the list is used up.
    """

    loss: float = 0.0
    twice: float = 0.0
    delay_s: float = 0.0
    cut_after: tuple[int, ...] = ()


class FaultyTransport:
    """Connections with faults, drawn from a seed.

    Attributes:
        hole: while set, frames vanish without anybody being told: a cut as networks have them.
        connections: made so far.
    """

    def __init__(
        self, inner: Callable[[], Transport], faults: Faults | None = None, *, seed: int = 0
    ) -> None:
        self._inner, self.faults = inner, faults or Faults()
        self.random = random.Random(seed)
        self.hole = False
        self.connections = 0

    async def connect(self) -> Connection:
        if self.hole:
            await asyncio.sleep(3600)
        self.connections += 1
        return _Faulty(self, await self._inner().connect(), self.connections - 1)

    def break_after(self, number: int) -> int | None:
        """Frames that the number-th connection carries."""
        cuts = self.faults.cut_after
        return cuts[number] if number < len(cuts) else None


class _Faulty:
    def __init__(self, transport: FaultyTransport, inner: Connection, number: int) -> None:
        self._transport, self._inner = transport, inner
        self._left = transport.break_after(number)
        self._arrived: asyncio.Queue[bytes | LinkError] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read())
        self._sending: set[asyncio.Task[None]] = set()

    async def send(self, frame: bytes) -> None:
        self._count()
        for delay_s in self._copies():
            task = asyncio.create_task(self._later(frame, delay_s))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _later(self, frame: bytes, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        try:
            await self._inner.send(frame)
        except LinkError as error:
            self._arrived.put_nowait(error)

    async def receive(self) -> bytes:
        self._count()
        frame = await self._arrived.get()
        if isinstance(frame, LinkError):
            raise frame
        return frame

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                frame = await self._inner.receive()
                for delay_s in self._copies():
                    loop.call_later(delay_s, self._arrived.put_nowait, frame)
        except LinkError as error:
            self._arrived.put_nowait(error)

    def _copies(self) -> list[float]:
        """When copies of a frame arrive."""
        faults, drawn = self._transport.faults, self._transport.random
        if self._transport.hole or drawn.random() < faults.loss:
            return []
        number = 2 if drawn.random() < faults.twice else 1
        return [drawn.random() * faults.delay_s for _ in range(number)]

    def _count(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise LinkError("cut by the test")

    async def close(self) -> None:
        self._reading.cancel()
        await self._inner.close()


class Restartable:
    """A service that can be replaced by a new one without the sessions."""

    def __init__(self, make: Callable[[], TargetService]) -> None:
        self._make = make
        self.service = make()

    def transport(self) -> Transport:
        """Connect to the current service."""
        return InProcessTransport(self.service)

    async def restart(self) -> None:
        """Kill the service and start another one."""
        old, self.service = self.service, self._make()
        await old.stop()
