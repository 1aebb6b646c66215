"""Which connection each session's answers go out on."""

from __future__ import annotations

from moaspec.errors import LinkError
from moaspec.remote.protocol import target_pb2 as pb
from moaspec.remote.server.response_stream import Stream
from moaspec.remote.server.server_session import ServerSession


class Attachments:
    """One stream at most for each session, and one session for each stream."""

    def __init__(self) -> None:
        self._streams: dict[bytes, Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, session: ServerSession) -> bool:
        return session.name in self._streams

    @property
    def streams(self) -> list[Stream]:
        """All that are attached."""
        return list(self._streams.values())

    def attach(self, stream: Stream, session: ServerSession) -> None:
        """From now on this session's answers go out here, and nowhere else."""
        old = self._streams.get(session.name)
        if old is stream and stream.session is session:
            return
        if old is not None and old is not stream:
            old.session = None
            old.stop(LinkError("The device came back on another connection."))
        stream.session = session
        self._streams[session.name] = stream

    def detach(self, stream: Stream) -> None:
        """A connection has ended."""
        if stream.session is not None:
            self.release(stream.session)

    def release(self, session: ServerSession) -> None:
        """Nobody is connected to this session any more, or it is forgotten."""
        stream = self._streams.get(session.name)
        if stream is not None and stream.session is session:
            stream.session = None
            del self._streams[session.name]

    def more(self, session: ServerSession) -> None:
        """There may be new activations."""
        stream = self._streams.get(session.name)
        if stream is not None:
            stream.more()

    def answer(
        self, session: ServerSession, base: int, activations: pb.Activations | None = None
    ) -> None:
        """Say what is committed past `base`; activations that nobody gets were not sent."""
        stream = self._streams.get(session.name)
        if stream is not None:
            verdict = session.answer(base, activations)
            message = pb.ServerMessage(session=session.name, turn=session.turn, verdict=verdict)
            stream.answer(message)
        elif session.records is not None and activations is not None:
            stop = activations.start + activations.count
            session.records.sent.discard(activations.start, stop)

    def problem(self, session: ServerSession, kind: pb.Problem.Kind, message: str) -> None:
        """Say what is wrong with a session."""
        stream = self._streams.get(session.name)
        if stream is not None:
            problem = pb.Problem(kind=kind, message=message)
            # Who is refused is so for good, also where the turn that was asked for never began.
            turn = 0 if kind == pb.Problem.REFUSED else session.turn
            stream.answer(pb.ServerMessage(session=session.name, turn=turn, problem=problem))
