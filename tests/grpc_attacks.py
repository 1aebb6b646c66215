"""Attacks on a `moaspec target-server`; `attacks.py` repeats them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

import serving
import tiny
from attacks import HELD_S, KEY, SLOW_EXPRESSION, Attack, Repeated, flood
from hostile import Hostile
from hostile_grammars import chained, rules
from moaspec.remote.protocol import identity, wire
from moaspec.remote.protocol import target_pb2 as pb
from moaspec.remote.protocol.grpc_transport import SERVICE
from moaspec.sampling.params import GREEDY

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""HTTP/2's, and empty settings: a connection without any call."""

CALL_S = 60.0

On = Callable[[grpc.aio.Channel], Awaitable[str]]


def connected(one: On) -> Repeated:
    """Over a connection of its own."""

    async def made(attack: Attack) -> str:
        options = [("grpc.use_local_subchannel_pool", 1)]
        if attack.ca is None:
            opened = grpc.aio.insecure_channel(attack.address, options)
        else:
            trusted = grpc.ssl_channel_credentials(Path(attack.ca).read_bytes())
            opened = grpc.aio.secure_channel(attack.address, trusted, options)
        async with opened as channel:
            try:
                return await one(channel)
            except grpc.aio.AioRpcError as error:
                return str(error.code().name)

    return made


def token(of: str = KEY) -> list[tuple[str, str]]:
    """Metadata of a call."""
    return [("authorization", f"Bearer {of}")]


def generate(**asked: Any) -> Repeated:
    """Ask the server alone for a text."""
    sampling = pb.Sampling(
        top_p=1.0, repetition_penalty=1.0, grammar=json.dumps(asked.pop("grammar", ""))
    )
    if sampling.grammar == '""':
        sampling.grammar = ""
    frame = pb.GenerateRequest(
        **{"token_ids": [1, 2, 3], "max_new_tokens": 8, **asked}, sampling=sampling
    ).SerializeToString()

    async def call(channel: grpc.aio.Channel) -> str:
        made = channel.unary_stream(f"/{SERVICE}/Generate")(frame, metadata=token(), timeout=CALL_S)
        messages = [one async for one in made]
        return f"{len(messages) > 0}"

    return connected(call)


def lark(text: str) -> Repeated:
    """A grammar as it is."""
    return generate(grammar={"grammars": [{"lark_grammar": text}]})


async def watches(channel: grpc.aio.Channel) -> str:
    """Streams that need no token."""
    watch = health_pb2_grpc.HealthStub(channel).Watch
    calls = [watch(health_pb2.HealthCheckRequest(service=SERVICE)) for _ in range(300)]
    firsts = await asyncio.gather(*(one.read() for one in calls), return_exceptions=True)
    await asyncio.sleep(HELD_S)
    for one in calls:
        one.cancel()
    return "refused" if any(isinstance(one, Exception) for one in firsts) else "watched"


async def wrong_token(channel: grpc.aio.Channel) -> str:
    """Guess tokens until refused."""
    await channel.unary_unary(f"/{SERVICE}/Describe")(b"", metadata=token("wrong"), timeout=CALL_S)
    return "described"


async def silent(channel: grpc.aio.Channel) -> str:
    """Calls that never send their request."""
    describe = channel.stream_unary(f"/{SERVICE}/Describe")
    calls = [describe(metadata=token(), timeout=CALL_S) for _ in range(100)]
    return "+".join(sorted({one.name for one in await asyncio.gather(*(c.code() for c in calls))}))


def opening(name: bytes) -> pb.ClientMessage:
    """A session of a short prompt, without activations."""
    message = pb.ClientMessage(session=name, turn=1)
    message.open.MergeFrom(
        pb.Open(
            protocol=identity.PROTOCOL,
            law=identity.SAMPLING_VERSION,
            target=identity.to_message(serving.target().identity),
            sampling=wire.sampling_message(GREEDY),
            token_ids=tiny.PROMPTS[0],
            prompt_length=len(tiny.PROMPTS[0]),
        )
    )
    return message


async def drafts(channel: grpc.aio.Channel) -> str:
    """A session whose drafts are as long as they may be, and wrong."""
    call = channel.stream_stream(f"/{SERVICE}/Converse")(metadata=token(), timeout=CALL_S)
    message = opening(os.urandom(16))
    await call.write(message.SerializeToString())
    for rounds in range(100):
        told = wire.parse(bytes(await call.read()), pb.ServerMessage())
        if not told.HasField("verdict"):
            return pb.Problem.Kind.Name(told.problem.kind)
        base = told.verdict.base + len(told.verdict.tokens)
        if base > serving.CONTEXT - 300:
            return f"{rounds} rounds"
        draft = pb.Draft(base=base, tokens=[7] * 256, parents=[*range(256)])
        sent = pb.ClientMessage(session=message.session, turn=1, draft=draft)
        await call.write(sent.SerializeToString())
    await call.write(
        pb.ClientMessage(session=message.session, turn=1, close=pb.Close()).SerializeToString()
    )
    return "verified"


HOSTILE = Hostile(serving.target(), "")


async def frames(channel: grpc.aio.Channel) -> str:
    """Send noise and lies about a session."""
    call = channel.stream_stream(f"/{SERVICE}/Converse")(metadata=token(), timeout=CALL_S)
    for _ in range(30):
        # grpc's client says INTERNAL or InvalidStateError where it writes to a call that has ended.
        if call.done():
            return (await call.code()).name
        await call.write(HOSTILE.frame())
        await asyncio.sleep(0.01)
    return "taken"


async def unread(channel: grpc.aio.Channel) -> str:
    """A text that nobody reads."""
    request = pb.GenerateRequest(
        token_ids=[1], max_new_tokens=1500, sampling=pb.Sampling(top_p=1.0, repetition_penalty=1.0)
    )
    call = channel.unary_stream(f"/{SERVICE}/Generate")(
        request.SerializeToString(), metadata=token(), timeout=CALL_S
    )
    await call.read()
    await asyncio.sleep(HELD_S)
    return "left"


GRPC: dict[str, Repeated] = {
    "huge prompt": generate(token_ids=[1] * 2_000_000),
    "stop strings": generate(stop=["x"] * 1_300_000),
    "definitions": generate(grammar={"grammars": [{"json_schema": chained(4000)}]}),
    "fewer definitions": generate(grammar={"grammars": [{"json_schema": chained(1900)}]}),
    "rules": lark(rules(4000)),
    "terminals": lark(rules(1900, name="T")),
    "regular expression": flood(8, lark(f"start: /{SLOW_EXPRESSION}/\n")),
    "long texts": flood(40, generate(max_new_tokens=1000)),
    "drafts": flood(16, connected(drafts)),
    "watches": connected(watches),
    "wrong token": connected(wrong_token),
    "silent calls": connected(silent),
    "frames": connected(frames),
    "unread texts": flood(4, connected(unread)),
    "half-open": lambda attack: attack.hold(b"", number=250),
    "no calls": lambda attack: attack.hold(PREFACE, number=250),
}
