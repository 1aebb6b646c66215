"""Hostile frames: no crash, no hang, nobody else's session touched, nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from hostile import NAMES, Hostile
from moaspec.model.checkpoint.moa_checkpoint import fingerprint
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.errors import LinkError, MoaSpecError, RefusedError, WireError
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.protocol import identity, wire
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol.transport import Connection, InProcessTransport, pipe
from moaspec_edge.server.service import TargetService
from moaspec_edge.server.session_store import ForeignSessionError

FRAMES = 1500


@given(st.binary(max_size=400))
def test_noise_is_a_message_or_an_error(frame: bytes) -> None:
    def parse_server(given: bytes) -> pb.ServerMessage:
        return wire.parse(given, pb.ServerMessage())

    for parse in (wire.parse_client, parse_server, wire.parse_generate):
        try:
            parse(frame)
        except WireError:
            continue


class Liar:
    """A server that answers whatever opens a session with these messages."""

    def __init__(self, *answers: Callable[[pb.Open], pb.ServerMessage]) -> None:
        self._answers = answers

    async def converse(self, _: str, connection: Connection) -> None:
        message = wire.parse_client(await connection.receive())
        while not message.HasField("open"):
            message = wire.parse_client(await connection.receive())
        for make in self._answers:
            answer = make(message.open)
            answer.session, answer.turn = answer.session or message.session, message.turn
            await connection.send(answer.SerializeToString())
        await asyncio.sleep(3600)


def lied_to(*answers: Callable[[pb.Open], pb.ServerMessage], **options: Any) -> None:
    """A session with a liar ends with an error of ours, and without text."""

    async def run() -> None:
        device = LocalDevice(tiny.target(), tiny.random_drafter(tiny.target()))
        session = RemoteSession(device, InProcessTransport(Liar(*answers)))
        with pytest.raises(MoaSpecError):
            await session.generate(tiny.PROMPTS[0], max_new_tokens=5, **options)
        assert session.result.token_ids == []
        await session.close()

    asyncio.run(run())


def unknown_token(number: int = 0) -> Callable[[pb.Open], pb.ServerMessage]:
    return lambda asked: said(asked, tokens=[tiny.VOCAB + number])


def said(asked: pb.Open, *, past: int = 0, **verdict: Any) -> pb.ServerMessage:
    base = len(asked.token_ids) + past
    return pb.ServerMessage(verdict=pb.Verdict(base=base, **verdict))


@given(st.binary(max_size=200), st.integers(0, 2**31))
@settings(max_examples=20)
def test_activations_of_wrong_lengths(data: bytes, number: int) -> None:
    """They are refused, or of no use; either way what follows them is read as it should be."""

    def lies(asked: pb.Open) -> pb.ServerMessage:
        start = number % (len(asked.token_ids) + 2)
        return pb.ServerMessage(
            activations=pb.Activations(start=start, count=number % 3, data=data)
        )

    lied_to(lies, unknown_token(number % 1000))


LIES: dict[str, Callable[[pb.Open], pb.ServerMessage]] = {
    "a text that is not ours": lambda asked: said(asked, past=1, tokens=[1]),
    "a base without end": lambda asked: said(asked, past=2**31, tokens=[1]),
    "a text without end": lambda asked: said(asked, tokens=[1] * 5000),
    "a token that is none": unknown_token(),
    "log-probabilities that nobody asked for": lambda asked: said(
        asked, tokens=[1], logprobs=[-0.5]
    ),
    "another session": lambda asked: pb.ServerMessage(
        session=bytes(16), verdict=said(asked, tokens=[1]).verdict
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_server_ends_the_session(lie: str) -> None:
    lied_to(LIES[lie])


def test_log_probabilities_that_are_missing() -> None:
    lied_to(lambda asked: said(asked, tokens=[1]), logprobs=True)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 1e300])
def test_times_that_cannot_be(seconds: float) -> None:
    """A server that is busy for ever, or for no number of seconds, is not waited for so long."""
    busy = pb.Problem(kind=pb.Problem.BUSY, retry_s=seconds)
    lied_to(lambda _: pb.ServerMessage(problem=busy), unknown_token())


class Stubborn:
    """A server that is alive and verifies nothing.

    Attributes:
        opened, connected: how often.
    """

    def __init__(self, kind: pb.Problem.Kind | None, *, of_no_turn: bool = False) -> None:
        self._kind, self._of_no_turn = kind, of_no_turn
        self.opened = self.connected = 0

    async def converse(self, _: str, connection: Connection) -> None:
        self.connected += 1
        while True:
            asked = wire.parse_client(await connection.receive())
            if asked.HasField("heartbeat"):
                answer = pb.ServerMessage(session=asked.session, heartbeat=asked.heartbeat)
            elif self._kind is None:
                continue
            else:
                self.opened += 1
                turn = 0 if self._of_no_turn else asked.turn
                problem = pb.Problem(kind=self._kind)
                answer = pb.ServerMessage(session=asked.session, turn=turn, problem=problem)
            await connection.send(answer.SerializeToString())


@pytest.mark.slow
@pytest.mark.parametrize("of_no_turn", [False, True])
@pytest.mark.parametrize("kind", [None, pb.Problem.BUSY, pb.Problem.LOST, pb.Problem.DRAINING])
def test_a_server_that_verifies_nothing_is_given_up_and_not_flooded(
    kind: pb.Problem.Kind | None, of_no_turn: bool
) -> None:
    server = Stubborn(kind, of_no_turn=of_no_turn)

    async def run() -> None:
        device = LocalDevice(tiny.target(), tiny.random_drafter(tiny.target()))
        options = RemoteOptions(give_up_s=1.0)
        session = RemoteSession(device, InProcessTransport(server), options)
        with pytest.raises(LinkError, match="for 1 s"):
            await session.generate(tiny.PROMPTS[0], max_new_tokens=5)
        await session.close()

    asyncio.run(run())
    # Doubling pauses from a twentieth of a second on; a machine that is busy asks less often.
    assert server.opened <= 12
    assert server.connected <= 6


def test_a_refusal_is_one_line() -> None:
    told = "no\r\n\x1b[2J" + "x" * 10_000

    async def run() -> None:
        device = LocalDevice(tiny.target(), tiny.random_drafter(tiny.target()))
        problem = pb.Problem(kind=pb.Problem.REFUSED, message=told)
        liar = Liar(lambda _: pb.ServerMessage(problem=problem))
        session = RemoteSession(device, InProcessTransport(liar))
        with pytest.raises(RefusedError) as refusal:
            await session.generate(tiny.PROMPTS[0], max_new_tokens=5)
        await session.close()
        assert str(refusal.value).isprintable()
        assert len(str(refusal.value)) < 600

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
            told = wire.parse(await near.receive(), pb.ServerMessage())
            assert told.problem.kind == pb.Problem.REFUSED
        assert list(service.sessions) == [held]
        await session.close()
        await service.stop()

    asyncio.run(run())


def _opening() -> pb.Open:
    return pb.Open(
        protocol=identity.PROTOCOL,
        sampling_version=identity.SAMPLING_VERSION,
        target=identity.to_message(tiny.target().identity),
        sampling=pb.Sampling(top_p=1.0, repetition_penalty=1.0),
        token_ids=[1, 2],
        prompt_length=2,
    )
