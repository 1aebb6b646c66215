"""After a cut the server sends the activations that the device says it lacks, lost ones too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import tiny
from moaspec.model.checkpoint.moa_checkpoint import fingerprint
from moaspec_core.sampling.params import GREEDY
from moaspec_edge.protocol import identity, wire
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol.transport import Connection, pipe
from moaspec_edge.server.service import TargetService

NAME = bytes(16)
PROMPT = tiny.PROMPTS[1]


def opening() -> pb.Open:
    return pb.Open(
        protocol=identity.PROTOCOL,
        sampling_version=identity.SAMPLING_VERSION,
        target=identity.to_message(tiny.target().identity),
        drafter=fingerprint(tiny.agreeing_drafter("llama")),
        codec=pb.CODEC_INT8,
        sampling=wire.sampling_message(GREEDY),
        token_ids=PROMPT,
        prompt_length=len(PROMPT),
    )


async def answered(
    at: TargetService, connection: Connection, message: pb.ClientMessage
) -> tuple[list[int], dict[int, bytes]]:
    """Send a message; all tokens, and activations by position, that the server then sends."""
    tokens, records, over = list[int](), dict[int, bytes](), False
    await connection.send(message.SerializeToString())
    while True:
        beat = pb.ClientMessage(session=NAME, turn=1, heartbeat=pb.Heartbeat(number=1))
        await connection.send(beat.SerializeToString())
        while not (told := await receive(connection)).HasField("heartbeat"):
            tokens += told.verdict.tokens
            part = told.activations
            size = len(part.data) // max(1, part.count)
            for i in range(part.count):
                records[part.start + i] = part.data[i * size : (i + 1) * size]
        if over:  # all answers came before the one to this heartbeat
            return tokens, records
        (session,) = at.sessions
        missing = session.records and [*session.records.sent.gaps(len(PROMPT))]
        over = session.decided and session.task is None and missing == []
        await asyncio.sleep(0.005)


async def receive(connection: Connection) -> pb.ServerMessage:
    return wire.parse(await asyncio.wait_for(connection.receive(), 60), pb.ServerMessage())


@asynccontextmanager
async def connected(at: TargetService) -> AsyncIterator[Connection]:
    ours, theirs = pipe()
    serving = asyncio.create_task(at.converse("alice", theirs))
    try:
        yield ours
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def test_lost_activations_are_sent_again() -> None:
    async def run() -> None:
        at = TargetService(tiny.target(), tiny.agreeing_drafter("llama"))
        async with connected(at) as connection:
            message = pb.ClientMessage(session=NAME, turn=1, open=opening())
            tokens, whole = await answered(at, connection, message)
        assert tokens == list(tiny.own_texts("llama")[1][:1])
        assert whole.keys() == {*range(len(PROMPT))}

        # The first two arrived, and the last one; the link was cut before the others did.
        last = len(PROMPT) - 1
        held = [pb.Range(start=0, stop=2), pb.Range(start=last, stop=last + 1)]
        async with connected(at) as connection:
            resume = pb.Resume(base=len(PROMPT), held=held)
            message = pb.ClientMessage(session=NAME, turn=1, resume=resume)
            again, lost = await answered(at, connection, message)
        assert again == tokens
        assert lost == {position: whole[position] for position in range(2, last)}
        await at.stop()

    asyncio.run(run())
