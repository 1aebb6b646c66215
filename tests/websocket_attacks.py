"""Attacks on a `moaspec target-server`; `attacks.py` repeats them."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

import serving
import tiny
from attacks import HELD_S, KEY, SLOW_EXPRESSION, Attack, Repeated, flood
from hostile import Hostile
from hostile_grammars import chained, rules
from moaspec_core.sampling.params import GREEDY
from moaspec_edge.protocol import identity, wire
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol.websocket_transport import SUBPROTOCOL

CALL_S = 60.0

On = Callable[[Attack], Awaitable[str]]


def connected(one: On) -> Repeated:
    """What came of calls that the server may refuse."""

    async def made(attack: Attack) -> str:
        try:
            async with asyncio.timeout(CALL_S):
                return await one(attack)
        except ConnectionClosed as error:
            return f"closed: {None if error.rcvd is None else error.rcvd.code}"
        except InvalidHandshake as error:
            return type(error).__name__

    return made


@asynccontextmanager
async def calling(attack: Attack, call: str, token: str = KEY) -> AsyncIterator[Any]:
    """A call over a connection of its own, before its request."""
    scheme, tls = "ws", None
    if attack.ca is not None:
        scheme, tls = "wss", ssl.create_default_context(cafile=attack.ca)
    async with connect(
        f"{scheme}://{attack.address}/v1/{call}",
        ssl=tls,
        subprotocols=[SUBPROTOCOL],
        additional_headers={"authorization": f"Bearer {token}"},
        compression=None,
        ping_interval=None,
        max_size=None,
        close_timeout=1,
    ) as opened:
        yield opened


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

    async def call(attack: Attack) -> str:
        async with calling(attack, "generate") as opened:
            await opened.send(frame)
            return f"{len([one async for one in opened]) > 0}"

    return connected(call)


def lark(text: str) -> Repeated:
    """A grammar as it is."""
    return generate(grammar={"grammars": [{"lark_grammar": text}]})


async def wrong_token(attack: Attack) -> str:
    """Guess tokens until refused."""
    async with calling(attack, "describe", "wrong") as opened:
        await opened.send(b"")
        await opened.recv()
    return "described"


async def silent(attack: Attack) -> str:
    """Calls that never send their request."""
    async with AsyncExitStack() as held:
        calls = [await held.enter_async_context(calling(attack, "describe")) for _ in range(100)]
        await asyncio.gather(*(one.wait_closed() for one in calls))
        return "+".join(sorted({str(one.close_code) for one in calls}))


async def pings(attack: Attack) -> str:
    """Control frames without end."""
    async with calling(attack, "converse") as opened:
        for _ in range(20_000):
            await opened.ping()
            await asyncio.sleep(0)  # so that the end of the connection is noticed
    return "taken"


def opening(name: bytes) -> pb.ClientMessage:
    """A session of a short prompt, without activations."""
    message = pb.ClientMessage(session=name, turn=1)
    message.open.MergeFrom(
        pb.Open(
            protocol=identity.PROTOCOL,
            sampling_version=identity.SAMPLING_VERSION,
            target=identity.to_message(serving.target().identity),
            sampling=wire.sampling_message(GREEDY),
            token_ids=tiny.PROMPTS[0],
            prompt_length=len(tiny.PROMPTS[0]),
        )
    )
    return message


async def drafts(attack: Attack) -> str:
    """A session whose drafts are as long as they may be, and wrong."""
    message = opening(os.urandom(16))
    async with calling(attack, "converse") as opened:
        await opened.send(message.SerializeToString())
        for rounds in range(100):
            told = wire.parse(await opened.recv(decode=False), pb.ServerMessage())
            if not told.HasField("verdict"):
                return pb.Problem.Kind.Name(told.problem.kind)
            base = told.verdict.base + len(told.verdict.tokens)
            if base > serving.CONTEXT - 300:
                return f"{rounds} rounds"
            draft = pb.Draft(base=base, tokens=[7] * 256, parents=[*range(256)])
            sent = pb.ClientMessage(session=message.session, turn=1, draft=draft)
            await opened.send(sent.SerializeToString())
        farewell = pb.ClientMessage(session=message.session, turn=1, close=pb.Close())
        await opened.send(farewell.SerializeToString())
    return "verified"


HOSTILE = Hostile(serving.target(), "")


async def frames(attack: Attack) -> str:
    """Send noise and lies about a session."""
    async with calling(attack, "converse") as opened:
        for _ in range(30):
            await opened.send(HOSTILE.frame())
            await asyncio.sleep(0.01)
    return "taken"


async def unread(attack: Attack) -> str:
    """A text that nobody reads."""
    request = pb.GenerateRequest(
        token_ids=[1], max_new_tokens=1500, sampling=pb.Sampling(top_p=1.0, repetition_penalty=1.0)
    )
    async with calling(attack, "generate") as opened:
        await opened.send(request.SerializeToString())
        await opened.recv()
        await asyncio.sleep(HELD_S)
    return "left"


WEBSOCKET: dict[str, Repeated] = {
    "huge prompt": generate(token_ids=[1] * 2_000_000),
    "stop strings": generate(stop=["x"] * 1_300_000),
    "definitions": generate(grammar={"grammars": [{"json_schema": chained(4000)}]}),
    "fewer definitions": generate(grammar={"grammars": [{"json_schema": chained(1900)}]}),
    "rules": lark(rules(4000)),
    "terminals": lark(rules(1900, name="T")),
    "regular expression": flood(8, lark(f"start: /{SLOW_EXPRESSION}/\n")),
    "long texts": flood(40, generate(max_new_tokens=1000)),
    "drafts": flood(16, connected(drafts)),
    "pings": connected(pings),
    "wrong token": connected(wrong_token),
    "silent calls": connected(silent),
    "frames": connected(frames),
    "unread texts": flood(4, connected(unread)),
    "half-open": lambda attack: attack.hold(b"", number=100),
    "slow head": lambda attack: attack.hold(b"GET /v1/converse HTTP/1.1\r\n", b"x", number=100),
}
"""Together fewer connections than an address may have: honest clients share the attackers'."""
