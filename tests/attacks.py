"""Attacks on real servers, over HTTP and WebSockets: `attacks.py KIND HOST:PORT SECONDS [CA]`.

KIND is http or websocket. A program of its own, so that it takes none of the honest clients' time.
Every attack is repeated until the time is over. Prints one line of JSON: what came of the attempts,
counted for each attack.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from hostile_grammars import chained, nested

KEY = "mallory"
MODEL = "tiny"
PAUSE_S = 0.2
"""Between two attempts; so attackers need less of a machine that they share with the server."""

HELD_S = 8.0
"""How long connections are held that say little or nothing."""

PATIENCE_S = 60.0
"""An answer that takes longer is counted as none."""

HUGE = "lorem ipsum " * 600_000
SLOW_EXPRESSION = "a?" * 20_000 + "a" * 20_000


@dataclass
class Attack:
    """Where an attack goes, and what came of it."""

    host: str
    port: int
    until: float
    ca: str | None = None
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def http(self) -> str:
        """The base URL of the server."""
        return f"http://{self.host}:{self.port}"

    @property
    def address(self) -> str:
        """The server address, HOST:PORT."""
        return f"{self.host}:{self.port}"

    async def hold(self, first: bytes, again: bytes = b"", number: int = 1) -> str:
        """Open connections, send something, then a little now and then."""
        held = [await asyncio.open_connection(self.host, self.port) for _ in range(number)]
        try:
            for _, writer in held:
                writer.write(first)
            until = time.monotonic() + HELD_S
            while time.monotonic() < until:
                await asyncio.sleep(1)
                for _, writer in held:
                    writer.write(again)
            return "held"
        finally:
            for _, writer in held:
                writer.close()


Repeated = Callable[[Attack], Awaitable[str]]


async def post(attack: Attack, path: str, body: dict[str, Any] | bytes, key: str = KEY) -> str:
    """The status of an answer."""
    content = body if isinstance(body, bytes) else json.dumps({"model": MODEL, **body}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        answer = await client.post(f"{attack.http}/v1/{path}", content=content, headers=headers)
    return str(answer.status_code)


def chat(**body: Any) -> Repeated:
    """Ask for a chat."""
    asked = {"messages": [{"role": "user", "content": "x"}], **body}
    return lambda attack: post(attack, "chat/completions", asked)


def formed(schema: dict[str, Any]) -> Repeated:
    """Ask for an answer after a schema."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return chat(response_format=form, max_tokens=8)


def flood(number: int, one: Repeated) -> Repeated:
    """Repeat an attack many times at once."""

    async def made(attack: Attack) -> str:
        told = await asyncio.gather(*(one(attack) for _ in range(number)), return_exceptions=True)
        return "+".join(sorted({str(one) if isinstance(one, str) else repr(one) for one in told}))

    return made


def request_head(length: int, *, stream: bytes = b"") -> bytes:
    """A request's first lines, and the body that is given."""
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        b"Authorization: Bearer " + KEY.encode() + b"\r\nContent-Type: application/json\r\n"
        b"Content-Length: " + str(length).encode() + b"\r\n\r\n" + stream
    )


def long_stream(choices: int) -> bytes:
    """The body of a request for a long stream."""
    said = [{"role": "user", "content": "tell"}]
    body = {"model": MODEL, "messages": said, "stream": True, "n": choices, "max_tokens": 1500}
    return json.dumps(body).encode()


async def slow_reader(attack: Attack) -> str:
    """A stream that nobody reads."""
    body = long_stream(8)
    return await attack.hold(request_head(len(body), stream=body))


async def leaver(attack: Attack) -> str:
    """A client that leaves in the middle of its stream."""
    reader, writer = await asyncio.open_connection(attack.host, attack.port)
    body = long_stream(1)
    writer.write(request_head(len(body), stream=body))
    await reader.read(200)
    writer.transport.abort()
    return "left"


async def stored(attack: Attack) -> str:
    """Large responses that the server is to keep."""
    tool = {"type": "function", "name": "f", "description": HUGE[:4_000_000]}
    body = {"input": "x", "tools": [tool], "tool_choice": "none", "max_output_tokens": 1}
    return await post(attack, "responses", body)


def values(number: int) -> dict[str, Any]:
    """Variables of many lists, objects and members, which take longest to parse."""
    return {"a": [{f"k{i}": []} for i in range(number)]}


HTTP: dict[str, Repeated] = {
    "many values": chat(chat_template_kwargs=values(20_000)),
    "too many values": chat(chat_template_kwargs=values(90_000)),
    "huge prompt": flood(2, chat(messages=[{"role": "user", "content": HUGE}])),
    "stop strings": chat(stop=["x"] * 1_300_000),
    "definitions": formed(chained(4000)),
    "fewer definitions": formed(chained(1900)),
    "deep schema": formed(nested(90, "properties")),
    "regular expression": formed({"type": "string", "pattern": SLOW_EXPRESSION}),
    "n=64": flood(4, chat(n=64, max_tokens=1500)),
    "wrong key": lambda attack: post(attack, "models", {}, key="wrong"),
    "deep JSON": lambda attack: post(attack, "chat/completions", b"[" * 200_000),
    "lone surrogate": chat(messages=[{"role": "user", "content": "half \ud800"}]),
    "slow reader": flood(4, slow_reader),
    "slow body": lambda attack: attack.hold(request_head(1 << 20), b"x", number=8),
    "slow head": lambda attack: attack.hold(b"POST /v1/chat", b"x", number=8),
    "half-open": lambda attack: attack.hold(b"", number=100),
    "leaver": flood(4, leaver),
    "stored responses": stored,
}


async def repeat(name: str, one: Repeated, attack: Attack) -> None:
    """Attack until the time is over."""
    while time.monotonic() < attack.until:
        try:
            rest_s = attack.until - time.monotonic()
            outcome = await asyncio.wait_for(one(attack), min(PATIENCE_S, rest_s) + 10)
        except Exception as error:  # noqa: BLE001 - whatever the server does to it
            outcome = type(error).__name__
        attack.outcomes[f"{name}: {outcome}"] += 1
        await asyncio.sleep(PAUSE_S)


async def run(kind: str, where: str, seconds: float, ca: str | None = None) -> Counter[str]:
    """All attacks of a kind, together; with a CA over TLS, where they are over WebSockets."""
    attacks = HTTP if kind == "http" else importlib.import_module("websocket_attacks").WEBSOCKET
    host, _, port = where.rpartition(":")
    attack = Attack(host, int(port), time.monotonic() + seconds, ca)
    await asyncio.gather(*(repeat(name, one, attack) for name, one in attacks.items()))
    return attack.outcomes


if __name__ == "__main__":
    counted = asyncio.run(run(sys.argv[1], sys.argv[2], float(sys.argv[3]), *sys.argv[4:]))
    sys.stdout.write(json.dumps(counted) + "\n")
