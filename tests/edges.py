"""Served edges whose link can be cut after so many frames, and mended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import serving
import tiny
from moaspec.errors import LinkError, RefusedError
from moaspec.remote import (
    Connection,
    GrpcServer,
    GrpcTransport,
    InProcessTransport,
    LinkOptions,
    LocalDevice,
    RemoteOptions,
    RemoteText,
    ServerOptions,
    TargetService,
)
from moaspec.serve.edge import EdgeLimits, EdgeSource
from moaspec.target import Target

PATIENT = LinkOptions(heartbeat_s=1.0, dead_after_s=30.0, backoff_s=0.05, max_backoff_s=0.1)
"""A busy machine must not look like a dead link; cuts here are noticed at once."""


class CutTransport:
    """A transport that is cut after some frames of verdicts, until somebody mends it."""

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
        if through.cut_after is not None:
            through.cut_after -= 1
            if through.cut_after < 0:
                through.cut, through.cut_after = True, None
        if through.cut:
            raise LinkError("cut")
        return frame

    async def close(self) -> None:
        await self._inner.close()


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
            options=RemoteOptions(link=PATIENT, draft="chain:2", **options),
            limits=EdgeLimits(active=active),
            faults=self.link,
        )

    @contextmanager
    def cut_for_a_while(self, *, after: int = 12, seconds: float = 1.0) -> Iterator[None]:
        """Cut the link after so many frames from the server, and mend it somewhat later."""
        over = threading.Event()

        def mend() -> None:
            while not self.link.cut and not over.wait(0.02):
                pass
            over.wait(seconds)
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


@contextmanager
def over_grpc() -> Iterator[EdgeSource]:
    """What `moaspec edge` makes of a `moaspec target-server`."""
    target = serving.target()
    drafter = tiny.random_drafter(target)
    found: list[int] = []
    ready, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        where = ServerOptions(host="127.0.0.1", port=0)
        async with GrpcServer(TargetService(target, drafter), where) as server:
            found.append(server.port)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait()
    transport = GrpcTransport(f"127.0.0.1:{found[0]}")
    try:
        yield EdgeSource(
            LocalDevice(target, drafter),
            transport,
            name=serving.MODEL,
            options=RemoteOptions(link=PATIENT, draft="chain:2"),
            alone=RemoteText(transport, target.stop_token_ids),
        )
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
