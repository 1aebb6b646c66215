"""A device's link to its server."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from moaspec_core.errors import LinkError
from moaspec_edge.device.events import LinkState, LinkStats, now
from moaspec_edge.device.link import CONNECT_S, DEAD_AFTER_S, ServerLink
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol.fleet import Fleet
from moaspec_edge.protocol.transport import Connection, InProcessTransport, Transport
from simulated_time import run_simulated


def echo(frame: bytes) -> bytes:
    """The answer to a heartbeat."""
    message = pb.ClientMessage.FromString(frame)
    return pb.ServerMessage(heartbeat=message.heartbeat).SerializeToString()


class Silent:
    """A server that reads all and says nothing."""

    async def converse(self, _: str, connection: Connection) -> None:
        while True:
            await connection.receive()


class Echo:
    """A server that sends heartbeats back."""

    async def converse(self, _: str, connection: Connection) -> None:
        while True:
            await connection.send(echo(await connection.receive()))


class Slow(InProcessTransport):
    """A link over which a connection takes longer than the limit of an attempt."""

    async def connect(self) -> Connection:
        await asyncio.sleep(3 * CONNECT_S)
        return await super().connect()


def made_link(transport: Transport | None = None) -> ServerLink:
    return ServerLink(
        Fleet.of(transport or InProcessTransport(Silent())).route(),
        bytes(16),
        LinkStats(),
        on_message=lambda _: None,
        on_connect=lambda: None,
        on_change=lambda: None,
    )


def test_who_gives_up_closing_a_link_gives_it_up_at_any_moment() -> None:
    """Python 3.11's `wait_for` loses a cancellation that comes as the awaited work ends."""

    async def close_and_give_up(moment: int) -> bool:
        link = made_link()
        link.start()
        while not link.connected:
            await asyncio.sleep(0)
        link.send(pb.ClientMessage(turn=1))
        closing = asyncio.create_task(link.close())
        for _ in range(moment):
            await asyncio.sleep(0)
        was_done = closing.done()
        closing.cancel()
        await asyncio.wait([closing])
        assert closing.cancelled() is not was_done
        await link.close()
        return was_done

    async def run() -> None:
        moment = 0
        while not await close_and_give_up(moment):
            moment += 1

    asyncio.run(run())


async def until(link: ServerLink, state: LinkState) -> None:
    async with asyncio.timeout(60):
        while link.stats.state != state:
            await asyncio.sleep(0.01)


def test_connections_that_take_longer_than_the_limit_of_an_attempt() -> None:
    async def run() -> None:
        link = made_link(Slow(Echo()))
        link.start()
        await until(link, "up")
        await link.close()

    run_simulated(run())


class Leaving(InProcessTransport):
    """Leads to a server that falls silent and then refuses connections, for good."""

    gone = False

    def __init__(self) -> None:
        super().__init__(self)
        self.attempts: list[float] = []
        """Times."""

    async def connect(self) -> Connection:
        self.attempts.append(now())
        if self.gone:
            raise LinkError("gone")
        return await super().connect()

    async def converse(self, _: str, connection: Connection) -> None:
        while True:
            frame = await connection.receive()
            if not self.gone:
                await connection.send(echo(frame))


def test_a_silent_link_is_dead_within_a_second_and_attempts_become_rarer() -> None:
    async def run() -> None:
        server = Leaving()
        link = made_link(server)
        link.start()
        await asyncio.sleep(10)
        assert link.stats.cuts == 0
        server.gone = True
        await until(link, "down")
        noticed_s, down_s = link.stats.noticed_s, link.stats.down_s
        assert noticed_s is not None
        assert down_s is not None
        assert DEAD_AFTER_S < noticed_s < 1
        await asyncio.sleep(5)
        _, *later = server.attempts
        times = [down_s, *later]
        pauses = [after - before for before, after in pairwise(times)]
        assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.0, 1.0, 1.0], abs=1e-6)
        await link.close()

    run_simulated(run())
