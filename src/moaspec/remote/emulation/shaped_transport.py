"""A transport that delays, drops, duplicates and reorders messages, for unit tests.

It needs neither root nor processes. Unlike TCP it also loses, duplicates and reorders messages; a
session must work even so.
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
    """Faults besides delay, rate and loss; may be changed while a session runs.

    Attributes:
        duplicate: probability that a message arrives twice.
        reorder: probability that a message is held back until after later ones.
        held_s: time that it is held back.
        seed: of these faults and of the link.
        cut: while True no message passes and no connection is made, without any error.

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
    """Traffic of a link, with lost messages.

    Attributes:
        keep: whether frames are kept.
        up, down: kept frames, in order.
        bytes_up, bytes_down: total sizes.
    """

    keep: bool = False
    up: list[bytes] = field(default_factory=list)
    down: list[bytes] = field(default_factory=list)
    bytes_up: int = 0
    bytes_down: int = 0

    def note(self, frame: bytes, *, upward: bool) -> None:
        """Count one frame, and keep it if wanted."""
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
        faults: further faults, which the caller may change at any time.
        traffic: counts frames of both directions.
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
        """Open a connection; while the link is cut, it fails after a pause.

        Raises:
            LinkError: the link is cut, or the inner transport's own.
        """
        if self.faults.cut:
            # A session must not rely on a quick refusal.
            await asyncio.sleep(0.05)
            raise LinkError("The emulated link is cut.")
        await asyncio.sleep(2 * self._link.delay_s)
        self._made += 1
        seed = self.faults.seed + 2 * self._made
        shaped = _ShapedConnection(await self._inner.connect(), self, seed)
        self._open.append(shaped)
        return shaped

    async def reset(self) -> None:
        """Break every open connection, as a restarted server or router does."""
        broken, self._open = self._open, []
        for connection in broken:
            await connection.close()

    def pacer(self, seed: int) -> Pacer:
        """Make the pacer of one direction."""
        return Pacer(self._link, seed)


class _ShapedConnection:
    """One connection over the emulated link."""

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
        # Messages may arrive at the same time, but a connection takes one at a time.
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
        except Exception as error:  # noqa: BLE001 - the receiver raises it
            self._arrived.put_nowait(error)

    def _carry(self, frame: bytes, pacer: Pacer, deliver: Any) -> None:
        """Deliver a message once, twice, late or never."""
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
        # A cut also drops messages that are on their way.
        if self._through.faults.cut:
            return
        try:
            await deliver(frame)
        except LinkError:
            pass  # the receiver gets it
        except Exception as error:  # noqa: BLE001 - the receiver raises it
            self._arrived.put_nowait(error)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
