"""A device's link to its server."""

from __future__ import annotations

import asyncio

from links import QUICK
from moaspec_edge.device.events import LinkStats
from moaspec_edge.device.link import ServerLink
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol.fleet import Fleet
from moaspec_edge.protocol.transport import Connection, InProcessTransport, Transport


class Silent:
    """A server that reads all and says nothing."""

    async def converse(self, _: str, connection: Connection) -> None:
        while True:
            await connection.receive()


class Echo:
    """A server that sends heartbeats back."""

    async def converse(self, _: str, connection: Connection) -> None:
        while True:
            message = pb.ClientMessage.FromString(await connection.receive())
            answer = pb.ServerMessage(heartbeat=message.heartbeat)
            await connection.send(answer.SerializeToString())


class Slow(InProcessTransport):
    """A link over which a connection takes longer than the limit of an attempt."""

    async def connect(self) -> Connection:
        await asyncio.sleep(3 * QUICK.connect_s)
        return await super().connect()


def made_link(transport: Transport | None = None) -> ServerLink:
    return ServerLink(
        Fleet.of(transport or InProcessTransport(Silent())).route(),
        bytes(16),
        QUICK,
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


def test_connections_that_take_longer_than_the_limit_of_an_attempt() -> None:
    async def run() -> None:
        link = made_link(Slow(Echo()))
        link.start()
        async with asyncio.timeout(60):
            while link.stats.state != "up":
                await asyncio.sleep(0.01)
        await link.close()

    asyncio.run(run())
