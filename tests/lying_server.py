"""A target server that lies to its devices: `lying_server.py TARGET DRAFTER`.

Prints its address, and runs until it is terminated. It describes itself as an honest one.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Sequence

from moaspec.backends.load import load_target
from moaspec.generation.drafters import load_drafter
from moaspec_core.errors import LinkError, WireError
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol import wire
from moaspec_edge.protocol.transport import Connection
from moaspec_edge.server.listeners.websocket_server import ServerOptions, TargetServer
from moaspec_edge.server.service import TargetService

RANDOM = random.Random(0)
HUGE = bytes(3 << 20)


def verdict(base: int, tokens: list[int], dropped: Sequence[int] = ()) -> pb.ServerMessage:
    """A verdict on a text of this length."""
    return pb.ServerMessage(verdict=pb.Verdict(base=base, tokens=tokens, dropped=dropped))


def problem(kind: pb.Problem.Kind, **values: object) -> pb.ServerMessage:
    """A problem of the session."""
    return pb.ServerMessage(problem=pb.Problem(kind=kind, **values))  # type: ignore[arg-type]


LIES: tuple[Callable[[int], pb.ServerMessage], ...] = (
    lambda base: verdict(base, [2**31]),
    lambda base: verdict(base + 2**31, [1]),
    lambda base: verdict(base, [1] * 5000),
    lambda base: verdict(base, []),
    lambda base: verdict(base, [1], dropped=[0, 2**31]),
    lambda base: verdict(base, [RANDOM.randrange(256)]),
    lambda base: verdict(base, [RANDOM.randrange(256) for _ in range(3)]),
    lambda base: pb.ServerMessage(activations=pb.Activations(start=0, count=base, data=HUGE)),
    lambda base: pb.ServerMessage(activations=pb.Activations(start=base, count=2**31, data=b"x")),
    lambda _: problem(pb.Problem.BUSY, retry_s=float("nan")),
    lambda _: problem(pb.Problem.LOST),
    lambda _: problem(pb.Problem.DRAINING),
    lambda _: problem(pb.Problem.REFUSED, message="\x1b[2J" * 10_000),
)


class LyingService(TargetService):
    """Answers whatever a device sends with a lie, with noise, or not at all."""

    async def converse(self, _: str, connection: Connection) -> None:
        """Lie until the device has had enough."""
        base = 0
        while True:
            try:
                message = wire.parse_client(await connection.receive())
            except (LinkError, WireError):
                return
            if message.HasField("heartbeat"):
                answer = pb.ServerMessage(heartbeat=message.heartbeat)
            else:
                base = len(message.open.token_ids) if message.HasField("open") else base
                answer = RANDOM.choice(LIES)(base)
            answer.session, answer.turn = message.session, message.turn
            noise = RANDOM.random()
            if noise < 0.05:
                return
            if noise < 0.1:
                await connection.send(RANDOM.randbytes(300))
            elif noise < 0.9:
                await connection.send(answer.SerializeToString())


async def main(model: str, drafter: str) -> None:
    """Serve until terminated."""
    target = load_target(model, dtype="float32")
    service = LyingService(target, load_drafter(drafter, target=target))
    async with TargetServer(service, ServerOptions(port=0)) as server:
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
