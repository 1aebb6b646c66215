"""Served edges with a link that can be cut after a number of frames, and restored.

A cut is noticed at once; with `links.patient_link` a busy machine does not look like another one.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import memorised_target
import serving
import tiny
from moaspec.target.target import Target
from moaspec_core.errors import LinkError, RefusedError
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions
from moaspec_edge.http.edge_source import EdgeLimits, EdgeSource
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol import wire
from moaspec_edge.protocol.fleet import Fleet
from moaspec_edge.protocol.transport import Connection, InProcessTransport
from moaspec_edge.server.listeners.websocket_server import ServerOptions, TargetServer
from moaspec_edge.server.service import TargetService

WRITTEN_ALONE = 4
"""Tokens after which a cut link is mended; a clock would tell little on a busy machine."""

PATIENCE_S = 60.0
"""After which it is mended all the same."""


class CutTransport:
    """A transport that is cut after some verdicts, until somebody mends it."""

    def __init__(self, inner: InProcessTransport) -> None:
        self._inner, self.cut = inner, False
        self.cut_after: int | None = None
        self.refuse_next = False

    async def connect(self) -> Connection:
        if self.refuse_next:
            self.refuse_next = False
            raise RefusedError("The server is full.")
        if self.cut:
            raise LinkError("cut")
        return _CutConnection(await self._inner.connect(), self)


class _CutConnection:
    def __init__(self, inner: Connection, through: CutTransport) -> None:
        self._inner, self._through = inner, through

    async def send(self, frame: bytes) -> None:
        if self._through.cut:
            raise LinkError("cut")
        await self._inner.send(frame)

    async def receive(self) -> bytes:
        frame, through = await self._inner.receive(), self._through
        # The heartbeats of idle sessions would cut the link before an answer begins.
        if through.cut_after is not None and wire.parse(frame, pb.ServerMessage()).HasField(
            "verdict"
        ):
            through.cut_after -= 1
            if through.cut_after < 0:
                through.cut, through.cut_after = True, None
        if through.cut:
            raise LinkError("cut")
        return frame

    async def close(self) -> None:
        await self._inner.close()


class PausedTransport(InProcessTransport):
    """A transport that may stop in the middle of an answer, for as long as it is told to."""

    most: int | None = None
    """Tokens of a text, prompt included, beyond which verdicts are lost."""

    async def connect(self) -> Connection:
        connection = await super().connect()
        receive = connection.receive

        async def receive_paused() -> bytes:
            while True:
                frame = await receive()
                base = pb.ServerMessage.FromString(frame).verdict.base
                if self.most is None or base <= self.most:
                    return frame

        vars(connection)["receive"] = receive_paused
        return connection

    @contextmanager
    def holding(self, tokens: int, question: str) -> Iterator[None]:
        """Stop an answer of the memorised target after about so many tokens."""
        prompt = memorised_target.prompt_ids(memorised_target.target(), question)
        self.most = len(prompt) + tokens
        try:
            yield
        finally:
            self.most = None


class Edge:
    """A served edge whose link can be cut."""

    def __init__(self, target: Target | None = None, *, active: int = 8, **options: Any) -> None:
        target = target or serving.target()
        drafter = tiny.random_drafter(target)
        self.link = CutTransport(InProcessTransport(TargetService(target, drafter)))
        self.source = EdgeSource(
            LocalDevice(target, drafter),
            self.link,
            name=serving.MODEL,
            options=RemoteOptions(draft="chain:2", **options),
            limits=EdgeLimits(active=active),
            faults=cast(Any, self.link),
        )

    @contextmanager
    def cut_for_a_while(self, *, after: int = 12, written: int = WRITTEN_ALONE) -> Iterator[None]:
        """Cut the link after this many verdicts, until the device has noticed and written on."""
        over, before = threading.Event(), self._written_alone

        def cut() -> bool:
            return not self._is_down or self._written_alone < before + written

        def mend() -> None:
            deadline = time.monotonic() + PATIENCE_S
            while cut() and time.monotonic() < deadline:
                if over.wait(0.02):
                    break
            self.link.cut = False

        self.link.cut_after = after
        mending = threading.Thread(target=mend)
        mending.start()
        try:
            yield
        finally:
            over.set()
            mending.join()
        assert self.link.cut_after is None, "the link was never cut"

    @property
    def _is_down(self) -> bool:
        return any(seat.session.stats.state == "down" for seat in self.source._sessions)

    @property
    def _written_alone(self) -> int:
        """Tokens that devices have written without a link."""
        return sum(seat.session.stats.provisional for seat in self.source._sessions)


@contextmanager
def over_websockets() -> Iterator[EdgeSource]:
    """What `moaspec edge` makes of a `moaspec target-server`."""
    target = serving.target()
    drafter = tiny.random_drafter(target)
    found: list[str] = []
    ready, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        where = ServerOptions(host="127.0.0.1", port=0)
        async with TargetServer(TargetService(target, drafter), where) as server:
            found.append(server.url)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait()
    fleet = Fleet.at(found)
    try:
        yield EdgeSource(
            LocalDevice(target, drafter),
            fleet,
            name=serving.MODEL,
            options=RemoteOptions(draft="chain:2"),
            server=fleet,
        )
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
