"""One connection of a device: passes its messages to its session."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from moaspec_core.errors import RefusedError, WireError
from moaspec_core.support import limits
from moaspec_core.support.tasks import end_tasks, time_limit
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol import wire
from moaspec_edge.protocol.transport import Connection
from moaspec_edge.server.response_stream import ResponseStream
from moaspec_edge.server.server_session import DraftRequest, ServerSession
from moaspec_edge.server.session_store import ForeignSessionError, NoRoomError, RateLimit

if TYPE_CHECKING:
    from moaspec_edge.server.service import TargetService

BUSY_RETRY_S = 0.5
"""Seconds after which a device that found no room may ask again, and twice as long each time.

Nothing says when there will be room: the server does not know how long texts of devices become.
"""


class Conversation:
    """Serves one connection of a device; `owner` owns its credentials."""

    def __init__(self, service: TargetService, owner: str, connection: Connection) -> None:
        self._service, self._owner = service, owner
        self.stream = ResponseStream(connection, on_sent=service.observer.sent)

    async def run(self) -> None:
        """Serve the connection until it ends, see `TargetService.converse`."""
        stream = self.stream
        sending, reading = asyncio.create_task(stream.run()), asyncio.create_task(self._read())
        try:
            waited: tuple[asyncio.Future[Any], ...] = (reading, stream.ended, sending)
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if stream.ended.done() and not reading.done():
                raise stream.ended.result()
            await (reading if reading.done() else sending)
        except (WireError, RefusedError, ForeignSessionError) as error:
            self._service.observer.refused(type(error).__name__)
            stream.problem(pb.Problem.REFUSED, str(error))
            await stream.flush(1.0)
            raise
        finally:
            if stream.session is not None:
                stream.session.detach()
            await end_tasks(sending, reading)

    async def _read(self) -> None:
        allowance = RateLimit(limits.MAX_MESSAGES_PER_S)
        silent_s = limits.MAX_SILENCE_S
        while True:
            async with time_limit(silent_s, f"The device said nothing for {silent_s:g} s."):
                frame = await self.stream.connection.receive()
            self._service.observer.received(len(frame))
            allowance.take()
            self._handle(wire.parse_client(frame))

    def _handle(self, message: pb.ClientMessage) -> None:
        sessions = self._service.sessions
        if self.stream.name not in (None, message.session):
            raise RefusedError("A connection carries one session; open another for this one.")
        self.stream.name = message.session
        if message.HasField("heartbeat"):
            heartbeat = pb.ServerMessage(turn=message.turn, heartbeat=message.heartbeat)
            self.stream.answer(heartbeat)
            return
        session = sessions.find(message.session, self._owner)
        if message.HasField("open"):
            self._open(session, message)
        elif message.HasField("close"):
            if session is not None:
                sessions.remove(session)
        elif session is None or message.turn > session.turn:
            self.stream.problem(pb.Problem.LOST, "There is no such session.", turn=message.turn)
        elif message.turn == session.turn:
            session.attach(self.stream)
            self._service.work.go_on(session)
            self._handle_in_turn(session, message)

    def _open(self, session: ServerSession | None, message: pb.ClientMessage) -> None:
        opening = self._service.capabilities.opening(message)
        if session is not None and message.turn < session.turn:
            return
        # A turn that has begun is finished, even if its device has reconnected.
        begun = session is not None and message.turn == session.turn
        if self._service.draining and not begun:
            self.stream.problem(pb.Problem.DRAINING, "The server is stopping.", turn=message.turn)
            return
        if session is None:
            try:
                session = self._service.sessions.create(message.session, self._owner)
            except NoRoomError as error:
                self.stream.problem(
                    pb.Problem.BUSY, str(error), turn=message.turn, retry_s=BUSY_RETRY_S
                )
                return
        session.attach(self.stream)
        self._service.work.put(session, opening)

    def _handle_in_turn(self, session: ServerSession, message: pb.ClientMessage) -> None:
        """Handle a message of a session's current turn."""
        most = self._service.capabilities.limits
        if message.HasField("draft"):
            draft = message.draft
            tree = wire.tree_of(draft, most)
            num_streamed = 0 if tree.tokens else min(draft.further, session.max_streamed)
            self._service.work.put(
                session, DraftRequest(session.turn, draft.base, tree, num_streamed)
            )
        elif message.HasField("resume"):
            session.goal = 0
            session.hold(wire.runs_of(message.resume.held, most))
            if session.decided and message.resume.base <= len(session.token_ids):
                session.answer(message.resume.base)
            self.stream.more()
        elif message.HasField("fetch") and session.records is not None:
            for start, stop in wire.runs_of(message.fetch.ranges, most):
                session.records.sent.discard(start, stop)
            self.stream.more()
