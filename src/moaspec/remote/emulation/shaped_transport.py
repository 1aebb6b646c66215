"""A transport that does to messages what a bad network does to packets, and worse.

For unit tests: no root, no processes. Messages take the place of packets, so one may be lost,
doubled or overtaken, which TCP would never let through; a session has to bear it all the same.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from moaspec.errors import InputError, LinkError
from moaspec.remote.emulation.emulated_link import LinkProfile
from moaspec.remote.emulation.pacer import Pacer
from moaspec.remote.protocol.transport import Connection, Transport


@dataclass
class Faults:
    """What befalls messages beside delay, rate and loss; may be changed while a session runs.

    Attributes:
        duplicate: probability that a message arrives twice.
        reorder: probability that a message is held back until after later ones.
        held_s: for how long it is held back.
        seed: of these draws and of the link's.
        cut: while True no message passes and no connection is made, and nobody is told.

    Raises:
        InputError: a number outside its range.
    """

    duplicate: float = 0.0
    reorder: float = 0.0
    held_s: float = 0.02
    seed: int = 0
    cut: bool = False

    def __post_init__(self) -> None:
        if not (0 <= self.duplicate <= 1 and 0 <= self.reorder <= 1 and self.held_s >= 0):
            raise InputError("Faults are probabilities within 0..1 and a time of at least 0.")


@dataclass
class Traffic:
    """What went into a link, lost messages included.

    Attributes:
        up, down: every frame, in order, as bytes; kept where `keep` is set.
        bytes_up, bytes_down: their sizes.
    """

    keep: bool = False
    up: list[bytes] = field(default_factory=list)
    down: list[bytes] = field(default_factory=list)
    bytes_up: int = 0
    bytes_down: int = 0

    def note(self, frame: bytes, *, upward: bool) -> None:
        """Count one frame."""
        if upward:
            self.bytes_up += len(frame)
        else:
            self.bytes_down += len(frame)
        if self.keep:
            (self.up if upward else self.down).append(frame)


class ShapedTransport:
    """Wraps a transport.

    Args:
        inner: makes the connections.
        link: delay, jitter, rate and loss of both directions.
        faults: more trouble; the caller may change it at any time, `cut` above all.
        traffic: counts what leaves and what arrives.
    """

    def __init__(
        self,
        inner: Transport,
        link: LinkProfile,
        faults: Faults | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        self._inner, self._link = inner, link
        self.faults = Faults() if faults is None else faults
        self.traffic = Traffic() if traffic is None else traffic
        self._made = 0
        self._open: list[_ShapedConnection] = []

    async def connect(self) -> Connection:
        """See `Transport`; while the link is cut nobody answers.

        Raises:
            LinkError: the link is cut, or the inner transport's own.
        """
        if self.faults.cut:
            # Long enough to show that the session does not count on a quick refusal.
            await asyncio.sleep(0.05)
            raise LinkError("The emulated link is cut.")
        await asyncio.sleep(2 * self._link.delay_s)
        self._made += 1
        seed = self.faults.seed + 2 * self._made
        shaped = _ShapedConnection(await self._inner.connect(), self, seed)
        self._open.append(shaped)
        return shaped

    async def reset(self) -> None:
        """Break every open connection at once, as a restarted server or router does."""
        broken, self._open = self._open, []
        for connection in broken:
            await connection.close()

    def pacer(self, seed: int) -> Pacer:
        """One direction of the link."""
        return Pacer(self._link, seed)


class _ShapedConnection:
    """One connection through the link."""

    def __init__(self, inner: Connection, through: ShapedTransport, seed: int) -> None:
        self._inner, self._through = inner, through
        self._arrived: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        self._up, self._down = through.pacer(seed), through.pacer(seed + 1)
        self._random = random.Random(seed)  # noqa: S311 - an emulation, nothing secret
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()
        self._closed = False
        self._start(self._read())

    async def send(self, frame: bytes) -> None:
        if self._closed:
            raise LinkError("The connection was closed.")
        self._through.traffic.note(frame, upward=True)
        self._carry(frame, self._up, self._hand_over)

    async def _hand_over(self, frame: bytes) -> None:
        # Messages arrive when they do, but a connection takes one at a time.
        async with self._sending:
            await self._inner.send(frame)

    async def receive(self) -> bytes:
        if self._closed and self._arrived.empty():
            raise LinkError("The connection was closed.")
        frame = await self._arrived.get()
        if isinstance(frame, Exception):
            self._closed = True
            raise frame
        return frame

    async def close(self) -> None:
        self._closed = True
        self._arrived.put_nowait(LinkError("The connection was closed."))
        for task in list(self._tasks):
            task.cancel()
        await self._inner.close()

    async def _read(self) -> None:
        try:
            while True:
                frame = await self._inner.receive()
                self._through.traffic.note(frame, upward=False)
                self._carry(frame, self._down, self._arrived.put)
        except Exception as error:  # noqa: BLE001 - whoever receives raises it
            self._arrived.put_nowait(error)

    def _carry(self, frame: bytes, pacer: Pacer, deliver: Any) -> None:
        """Let a message arrive once, twice, late or never."""
        faults, now = self._through.faults, asyncio.get_running_loop().time()
        copies = 2 if self._random.random() < faults.duplicate else 1
        for _ in range(copies):
            at = pacer.arrival(now, len(frame))
            if at is None or faults.cut:
                continue
            held = faults.held_s if self._random.random() < faults.reorder else 0.0
            self._start(self._deliver(frame, at + held - now, deliver))

    async def _deliver(self, frame: bytes, after_s: float, deliver: Any) -> None:
        if after_s > 0:
            await asyncio.sleep(after_s)
        # What was on its way when the link was cut is lost too.
        if self._through.faults.cut:
            return
        try:
            await deliver(frame)
        except LinkError:
            pass  # whoever receives will notice
        except Exception as error:  # noqa: BLE001 - whoever receives raises it
            self._arrived.put_nowait(error)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
