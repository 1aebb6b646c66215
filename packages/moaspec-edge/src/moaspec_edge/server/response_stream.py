"""The messages that a server sends on one connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from moaspec_core.errors import LinkError
from moaspec_core.support import limits
from moaspec_core.support.tasks import time_limit
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol.transport import Connection

if TYPE_CHECKING:
    from moaspec_edge.server.server_session import ServerSession

MAX_WAITING = 64
"""Answers that may wait until the device reads; a working device never needs this number."""


class ResponseStream:
    """Sends answers first, and activations when no answer waits.

    Args:
        on_sent: called with the size of each message after it is sent.

    Attributes:
        session: whose activations are sent; None before the device named one.
        name: the session's name, as the device gave it.
        ended: resolves to the reason when the stream ends.
    """

    def __init__(self, connection: Connection, *, on_sent: Callable[[int], None]) -> None:
        self.connection = connection
        self.session: ServerSession | None = None
        self.name: bytes | None = None
        self.ended: asyncio.Future[LinkError] = asyncio.get_running_loop().create_future()
        self._on_sent = on_sent
        self._waiting: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()

    def answer(self, message: pb.ServerMessage) -> None:
        """Queue a message of the stream's session; the stream ends if the queue is full."""
        if len(self._waiting) >= MAX_WAITING:
            self.stop(LinkError("The device does not read what it asks for."))
            return
        message.session = self.name or b""
        self._waiting.append(message.SerializeToString())
        self.more()

    def problem(
        self, kind: pb.Problem.Kind, text: str, *, turn: int = 0, retry_s: float = 0.0
    ) -> None:
        """Tell the device of a problem; without a turn it concerns the session as a whole."""
        problem = pb.Problem(kind=kind, message=text, retry_s=retry_s)
        self.answer(pb.ServerMessage(turn=turn, problem=problem))

    def more(self) -> None:
        """Wake the sender: there may be new activations."""
        self._idle.clear()
        self._wake.set()

    def stop(self, reason: LinkError) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)
        self._waiting.clear()
        self._idle.set()
        self._wake.set()

    async def flush(self, timeout_s: float) -> None:
        """Wait until everything is sent, at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()

    async def run(self) -> None:
        """Send until cancelled; LinkError where the device does not read."""
        while True:
            frame = self._next()
            if frame is None:
                self._idle.set()
                await self._wake.wait()
                self._wake.clear()
                continue
            await self._send(frame)

    def _next(self) -> bytes | None:
        if self._waiting:
            return self._waiting.popleft()
        session = self.session
        if session is None or session.records is None:
            return None
        block = session.records.next_block()
        if block is None:
            return None
        message = pb.ServerMessage(session=session.name, turn=session.turn, activations=block)
        return message.SerializeToString()

    async def _send(self, frame: bytes) -> None:
        seconds = limits.MAX_SEND_S
        async with time_limit(seconds, f"The device read nothing for {seconds:g} s."):
            await self.connection.send(frame)
        self._on_sent(len(frame))
