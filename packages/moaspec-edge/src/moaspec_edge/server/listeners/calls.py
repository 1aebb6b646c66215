"""The calls of target.proto, frame by frame."""

import contextlib
from collections.abc import Awaitable, Callable

from moaspec_core.support import limits
from moaspec_core.support.tasks import time_limit
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol import wire
from moaspec_edge.protocol.transport import Connection
from moaspec_edge.server.listeners.admission import request_deadline
from moaspec_edge.server.service import TargetService

PIECE_BYTES = 1 << 18
"""Bytes of weights in one message: small enough that verdicts on the same link wait little."""

Call = Callable[[TargetService, str, Connection], Awaitable[None]]


async def _describe(service: TargetService, _: str, connection: Connection) -> None:
    """Describe the server; the request has no fields."""
    await _request(connection)
    await connection.send(service.capabilities.describe().SerializeToString())


async def _generate(service: TargetService, owner: str, connection: Connection) -> None:
    request = wire.parse_generate(await _request(connection))
    async with contextlib.aclosing(service.generate(owner, request)) as texts:
        async for generated in texts:
            await _send(connection, generated.SerializeToString())


async def _update(service: TargetService, _: str, connection: Connection) -> None:
    """Send the device's part of the newest drafter in pieces."""
    packing = wire.parse(await _request(connection), pb.DescribeRequest()).packing
    version, weights = await service.device_weights(packing)
    for start in range(0, len(weights), PIECE_BYTES):
        data = weights[start : start + PIECE_BYTES]
        piece = pb.Weights(data=data, version=version, packing=packing)
        await _send(connection, piece.SerializeToString())


async def _send(connection: Connection, frame: bytes) -> None:
    timeout_s = limits.MAX_SEND_S
    async with time_limit(timeout_s, f"The client read nothing for {timeout_s:g} s."):
        await connection.send(frame)


CALLS: dict[str, Call] = {
    "Describe": _describe,
    "Converse": TargetService.converse,
    "Generate": _generate,
    "Update": _update,
}
"""By their names in target.proto. They raise `MoaSpecError`, which the server tells its client."""


async def _request(connection: Connection) -> bytes:
    """The request of a call that has one; LinkError without."""
    async with request_deadline():
        return await connection.receive()
