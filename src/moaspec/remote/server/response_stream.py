"""The messages that a server sends, and the connection of each session."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from moaspec.errors import LinkError
from moaspec.remote.protocol import target_pb2 as pb
from moaspec.remote.protocol.transport import Connection
from moaspec.remote.server.server_session import ServerSession

MAX_WAITING = 64
"""Answers that may wait until the device reads; a working device never needs this number."""


class ResponseStream:
    """Sends answers first, and activations when no answer waits.

    Args:
        connection: to the device.
        send_timeout_s: how long the device may take to read one message.
        on_sent: called with the size of each message after it is sent.

    Attributes:
        ended: resolves to the reason when the stream ends.
    """

    def __init__(
        self, connection: Connection, *, send_timeout_s: float, on_sent: Callable[[int], None]
    ) -> None:
        self.connection = connection
        self.session: ServerSession | None = None
        self.name: bytes | None = None
        self.ended: asyncio.Future[LinkError] = asyncio.get_running_loop().create_future()
        self._timeout_s, self._on_sent = send_timeout_s, on_sent
        self._waiting: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()

    def answer(self, message: pb.ServerMessage) -> None:
        """Queue a message; the stream ends if the queue is full."""
        if len(self._waiting) >= MAX_WAITING:
            self.stop(LinkError("The device does not read what it asks for."))
            return
        self._waiting.append(message.SerializeToString())
        self._idle.clear()
        self._wake.set()

    def more(self) -> None:
        """Wake the sender: there may be new activations."""
        self._idle.clear()
        self._wake.set()

    def stop(self, reason: LinkError) -> None:
        """End this stream and drop queued messages."""
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
        """Send until cancelled.

        Raises:
            LinkError: the connection broke, or the device does not read.
        """
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
        block = None if session is None or session.records is None else session.records.next_block()
        if block is None or session is None:
            return None
        message = pb.ServerMessage(session=session.name, turn=session.turn, activations=block)
        return message.SerializeToString()

    async def _send(self, frame: bytes) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.connection.send(frame)
        except TimeoutError as error:
            raise LinkError(f"The device read nothing for {self._timeout_s:g} s.") from error
        self._on_sent(len(frame))


class SessionStreams:
    """Maps each session to at most one stream, and each stream to one session."""

    def __init__(self) -> None:
        self._streams: dict[bytes, ResponseStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, session: ServerSession) -> bool:
        return session.name in self._streams

    @property
    def streams(self) -> list[ResponseStream]:
        """All streams with a session."""
        return list(self._streams.values())

    def attach(self, stream: ResponseStream, session: ServerSession) -> None:
        """Send this session's answers on this stream from now on."""
        old = self._streams.get(session.name)
        if old is stream and stream.session is session:
            return
        if old is not None and old is not stream:
            old.session = None
            old.stop(LinkError("The device came back on another connection."))
        stream.session = session
        self._streams[session.name] = stream

    def detach(self, stream: ResponseStream) -> None:
        """Detach a stream whose connection has ended."""
        if stream.session is not None:
            self.release(stream.session)

    def release(self, session: ServerSession) -> None:
        """Detach a session from its stream."""
        stream = self._streams.get(session.name)
        if stream is not None and stream.session is session:
            stream.session = None
            del self._streams[session.name]

    def more(self, session: ServerSession) -> None:
        """Wake the sender: there may be new activations."""
        stream = self._streams.get(session.name)
        if stream is not None:
            stream.more()

    def answer(
        self, session: ServerSession, base: int, activations: pb.Activations | None = None
    ) -> None:
        """Send the tokens committed past `base`; without a stream, mark activations as unsent."""
        stream = self._streams.get(session.name)
        if stream is not None:
            verdict = session.answer(base, activations)
            message = pb.ServerMessage(session=session.name, turn=session.turn, verdict=verdict)
            stream.answer(message)
        elif session.records is not None and activations is not None:
            stop = activations.start + activations.count
            session.records.sent.discard(activations.start, stop)

    def problem(self, session: ServerSession, kind: pb.Problem.Kind, message: str) -> None:
        """Tell the device about a problem of its session."""
        stream = self._streams.get(session.name)
        if stream is not None:
            problem = pb.Problem(kind=kind, message=message)
            # A refusal concerns the whole session, so it names no turn.
            turn = 0 if kind == pb.Problem.REFUSED else session.turn
            stream.answer(pb.ServerMessage(session=session.name, turn=turn, problem=problem))
