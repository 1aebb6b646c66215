"""Hostile frames: no crash, no hang, nobody else's session touched, nothing left behind."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from hostile import NAMES, Hostile
from moaspec.decode import Chain
from moaspec.errors import LinkError, MoaSpecError, WireError
from moaspec.remote import (
    InProcessTransport,
    LocalDevice,
    RemoteOptions,
    RemoteSession,
    TargetService,
    fingerprint,
    identity,
    wire,
)
from moaspec.remote import target_pb2 as pb
from moaspec.remote.store import ForeignSessionError
from moaspec.remote.transport import Connection, pipe

FRAMES = 1500


@given(st.binary(max_size=400))
@settings(deadline=None)
def test_noise_is_a_message_or_an_error(frame: bytes) -> None:
    for parse in (wire.parse_client, wire.parse_server, wire.parse_generate):
        try:
            parse(frame)
        except WireError:
            continue


@given(st.binary(max_size=200), st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_a_lying_server_ends_the_session_with_an_error(data: bytes, number: int) -> None:
    """Verdicts and activations of wrong lengths: no wrong text, no hang."""

    async def lie(connection: Connection) -> None:
        message = wire.parse_client(await connection.receive())
        while not message.HasField("open"):
            message = wire.parse_client(await connection.receive())
        base = len(message.open.token_ids)
        lies = pb.Activations(start=number % (base + 2), count=number % 3, data=data)
        answer = pb.ServerMessage(session=message.session, turn=message.turn, activations=lies)
        await connection.send(answer.SerializeToString())
        # Whatever became of that: a token that does not exist.
        answer.verdict.CopyFrom(pb.Verdict(base=base, tokens=[tiny.VOCAB + number % 1000]))
        await connection.send(answer.SerializeToString())
        await asyncio.sleep(1)

    class Liar:
        async def converse(self, _: str, connection: Connection) -> None:
            await lie(connection)

    async def run() -> None:
        device = LocalDevice(tiny.target(), tiny.random_drafter(tiny.target()))
        session = RemoteSession(device, InProcessTransport(Liar()))
        with pytest.raises(MoaSpecError):
            await session.generate(tiny.PROMPTS[0], max_new_tokens=5)
        assert session.result.token_ids == []
        await session.close()

    asyncio.run(run())


def test_hostile_frames_change_nothing_for_others() -> None:
    target = tiny.target()
    drafter = tiny.agreeing_drafter("llama")

    async def attack(service: TargetService) -> None:
        hostile = Hostile(target, fingerprint(drafter))
        for _ in range(FRAMES // 10):
            near, far = pipe()
            serving = asyncio.create_task(service.converse("mallory", far))
            reading = asyncio.create_task(_read_all(near))
            for _ in range(10):
                if serving.done():
                    break
                await near.send(hostile.frame())
                await asyncio.sleep(0)
            await near.close()
            # Errors of this package end a connection; any other would be a fault.
            await asyncio.gather(serving, return_exceptions=True)
            assert isinstance(serving.exception(), MoaSpecError)
            await reading

    async def run() -> None:
        service = TargetService(target, drafter)
        honest = RemoteSession(
            LocalDevice(target, drafter),
            InProcessTransport(service, "alice"),
            RemoteOptions(draft=Chain(2)),
        )
        attacking = asyncio.create_task(attack(service))
        texts = 0
        while not attacking.done() or not texts:
            result = await honest.generate(tiny.PROMPTS[1], max_new_tokens=tiny.NEW_TOKENS)
            assert result.token_ids == list(tiny.own_texts("llama")[1])
            texts += 1
        await attacking
        await honest.close()
        await asyncio.sleep(0)
        assert {session.owner for session in service.sessions} <= {"mallory"}
        assert len(service.sessions) <= len(NAMES)
        await service.stop()
        assert service.shared.num_rows == 0
        assert service.verifier.cache.num_bytes == 0

    asyncio.run(run())


async def _read_all(connection: Connection) -> None:
    try:
        while True:
            await connection.receive()
    except LinkError:
        return


def test_sessions_belong_to_their_credentials() -> None:
    async def run() -> None:
        service = TargetService(tiny.target())
        device = LocalDevice(tiny.target(), tiny.ReplayDrafting([]))
        session = RemoteSession(device, InProcessTransport(service, "alice"))
        await session.generate(tiny.PROMPTS[0], max_new_tokens=3)
        (held,) = service.sessions
        for kind in ("resume", "draft", "close", "fetch", "open"):
            near, far = pipe()
            message = pb.ClientMessage(session=held.name, turn=held.turn)
            getattr(message, kind).SetInParent()
            if kind == "open":
                message.open.MergeFrom(_opening())
            await near.send(message.SerializeToString())
            with pytest.raises(ForeignSessionError):
                await service.converse("mallory", far)
            told = wire.parse_server(await near.receive())
            assert told.problem.kind == pb.Problem.REFUSED
        assert list(service.sessions) == [held]
        await session.close()
        await service.stop()

    asyncio.run(run())


def _opening() -> pb.Open:
    return pb.Open(
        protocol=identity.PROTOCOL,
        law=identity.LAW,
        target=identity.to_message(tiny.target().identity),
        sampling=pb.Sampling(top_p=1.0, repetition_penalty=1.0),
        token_ids=[1, 2],
        prompt_length=2,
    )
