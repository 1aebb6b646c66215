"""Connections that carry frames, each one serialised message of target.proto."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Protocol, TypeVar

from moaspec_core.errors import LinkError, MoaSpecError
from moaspec_edge.protocol import target_pb2 as pb

T = TypeVar("T")

MAX_QUEUED_FRAMES = 64
"""Frames that an in-process connection queues in each direction before senders wait."""


class Connection(Protocol):
    """One stream of frames in both directions; LinkError once it is broken or closed."""

    async def send(self, frame: bytes) -> None:
        """Send a frame; waits while the other side does not read. One call at a time."""
        ...

    async def receive(self) -> bytes:
        """Receive the next frame."""
        ...

    async def close(self) -> None:
        """Close the connection; waiting calls raise `LinkError`."""
        ...


class Transport(Protocol):
    """Makes connections to one server.

    Methods raise LinkError where the server cannot be reached or the link breaks, and RefusedError
    where the server refuses, as for wrong credentials.
    """

    async def connect(self) -> Connection:
        """Open a connection to the server."""
        ...


class ServerTransport(Transport, Protocol):
    """Makes all calls of target.proto."""

    async def describe(self) -> pb.Description:
        """Ask the server to describe itself."""
        ...

    def generate(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.Generated]:
        """Let the server decode alone; yields its messages."""
        ...

    def weights(self, packing: str = "") -> AsyncGenerator[pb.Weights]:
        """The newest drafter's weights for devices in a form, piece by piece; see `Update`."""
        ...


class ConnectionHandler(Protocol):
    """A service that serves connections, such as `TargetService`."""

    async def converse(self, owner: str, connection: Connection) -> None:
        """Serve one connection until it ends."""
        ...


class InProcessTransport:
    """Connections to a service in the same event loop.

    Args:
        owner: owner of the connections; a real server finds it from credentials.
    """

    def __init__(self, service: ConnectionHandler, owner: str = "local") -> None:
        self._service, self._owner = service, owner
        self._tasks: set[asyncio.Task[None]] = set()

    async def connect(self) -> Connection:
        near, far = pipe()
        task = asyncio.create_task(self._serve(far))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return near

    async def _serve(self, far: Connection) -> None:
        with contextlib.suppress(MoaSpecError):  # the device was told
            await self._service.converse(self._owner, far)
        await far.close()


class _PipeEnd:
    """One end of a pipe."""

    def __init__(self, incoming: asyncio.Queue[bytes], outgoing: asyncio.Queue[bytes]) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self._closed = asyncio.Event()
        self.other: _PipeEnd | None = None

    async def send(self, frame: bytes) -> None:
        await self._or_closed(self._outgoing.put(frame))

    async def receive(self) -> bytes:
        if not self._incoming.empty():
            return self._incoming.get_nowait()
        return await self._or_closed(self._incoming.get())

    async def close(self) -> None:
        self._closed.set()
        if self.other is not None:
            self.other._closed.set()

    async def _or_closed(self, waiting: Coroutine[Any, Any, T]) -> T:
        """Wait for a queue until the pipe is closed."""
        task = asyncio.ensure_future(waiting)
        closed = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait((task, closed), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise LinkError("The connection was closed.")
            return task.result()
        finally:
            task.cancel()
            closed.cancel()


def pipe() -> tuple[Connection, Connection]:
    """Make two connected ends: each receives the frames that the other sends."""
    there: asyncio.Queue[bytes] = asyncio.Queue(MAX_QUEUED_FRAMES)
    back: asyncio.Queue[bytes] = asyncio.Queue(MAX_QUEUED_FRAMES)
    near, far = _PipeEnd(back, there), _PipeEnd(there, back)
    near.other, far.other = far, near
    return near, far
