"""What an honest client waits beside floods of others, and what its server's `/health` does.

One server with a key for each client: `moaspec serve`, and `moaspec target-server` for floods of
devices. The honest client sends short chats, one after another, alone and then beside each flood; a
text that differs from the one alone is counted. Several floods of one kind have a key each. For
devices `health_ms` is a connection with a description of the server. To compare versions, run it
with each one's packages first in PYTHONPATH. The last line is JSON.

Usage: python benchmarks/fairness.py smollm2-135m [--floods long2 n64] [--seconds 20] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import hashlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import torch

from moaspec import Target, load_target
from moaspec.calibration.measure_costs import machine
from moaspec_core.cli.prompts import chat_ids
from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.drafting.protocols import TextProposer
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.errors import MoaSpecError
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.protocol.websocket_transport import WebSocketTransport
from moaspec_edge.server.auth import Credentials

KEYS = [f"key{number}" for number in range(12)]
HONEST = KEYS[0]
CHATS = (
    "Name three colours.",
    "What is the capital of Italy?",
    "Say hello in French.",
    "How many legs has a spider?",
)
NEW_TOKENS = 24
WORDS = ("river", "stone", "lamp", "window", "garden", "letter", "music", "winter", "engine")


@dataclass
class Server:
    """An address, its process, and clients that never wait for a free connection."""

    url: str
    process: subprocess.Popen[bytes]

    def client(self, key: str) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=600, limits=limits)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    @property
    def peak_mib(self) -> float:
        """Peak resident memory since the start."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024


@contextlib.asynccontextmanager
async def served(model: str, port: int, options: list[str]) -> AsyncIterator[Server]:
    """A server in a process of its own."""
    environment = {**os.environ, "MOASPEC_API_KEY": " ".join(KEYS)}
    command = [sys.executable, "-m", "moaspec_core", "serve", "--model", model, "--port", str(port)]
    process = subprocess.Popen([*command, *options], env=environment)  # noqa: S603 - our own
    server = Server(f"http://127.0.0.1:{port}", process)

    async def ask() -> None:
        async with server.client("") as http:
            await http.get("/health")

    async with until_answered(process, ask):
        yield server


@contextlib.asynccontextmanager
async def served_target(model: str, port: int, options: list[str]) -> AsyncIterator[Server]:
    """A target server in a process of its own."""
    tokens = {key: {"sha256": hashlib.sha256(key.encode()).hexdigest()} for key in KEYS}
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "tokens.json"
        file.write_text(json.dumps(tokens))
        command = [sys.executable, "-m", "moaspec_core", "target-server", "--model", model]
        command += ["--port", str(port), "--tokens", str(file), *options]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: S603 - our own
        server = Server(f"http://127.0.0.1:{port}", process)
        async with until_answered(process, lambda: describe(server)):
            yield server


@contextlib.asynccontextmanager
async def until_answered(
    process: subprocess.Popen[bytes], ask: Callable[[], Awaitable[None]]
) -> AsyncIterator[None]:
    """Wait until a server answers, and end it in the end."""
    try:
        while True:
            with contextlib.suppress(httpx.TransportError, MoaSpecError):
                await ask()
                break
            if process.poll() is not None:
                raise SystemExit("The server did not start.")
            await asyncio.sleep(0.2)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()


async def describe(server: Server) -> None:
    """A connection and a question to a target server."""
    await transport(server, KEYS[0]).describe()


def transport(server: Server, key: str) -> WebSocketTransport:
    """Of a device with this key."""
    return WebSocketTransport(server.url.replace("http", "ws"), Credentials(token=key))


def long_prompt(number: int, words: int) -> str:
    """A text that shares no beginning with another."""
    draw = random.Random(number)  # noqa: S311 - words, no secret
    return f"{number} " + " ".join(draw.choice(WORDS) for _ in range(words))


async def post(http: httpx.AsyncClient, **body: Any) -> None:
    """A completion whose answer nobody looks at."""
    await http.post("/v1/completions", json={"model": MODEL, "temperature": 0, **body})


async def long_prompts(server: Server, key: str, number: int, words: int, **body: Any) -> None:
    """So many long prompts at once, again and again."""
    start = 0
    async with server.client(key) as http:
        while True:
            wave = range(start, start + number)
            await asyncio.gather(
                *(post(http, prompt=long_prompt(i, words), max_tokens=1, **body) for i in wave)
            )
            start += number


async def many_choices(server: Server, key: str, number: int) -> None:
    """One small request for many long texts."""
    async with server.client(key) as http:
        while True:
            await post(
                http, prompt="Once", n=number, max_tokens=8000, ignore_eos=True, temperature=1
            )


async def unread(server: Server, key: str, number: int) -> None:
    """Streams with log-probabilities that nobody reads."""
    body = json.dumps(
        {
            **{"model": MODEL, "prompt": "Once", "max_tokens": 2000, "stream": True},
            **{"ignore_eos": True, "logprobs": 5},
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    kept = []
    for _ in range(number):
        kept.append(await asyncio.open_connection(*server.address, limit=1024))
        kept[-1][1].write(head.encode() + body)
    await asyncio.Event().wait()


async def drip(server: Server, key: str, number: int) -> None:
    """Bodies in chunks of one byte."""
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n"
        f"authorization: Bearer {key}\r\n\r\n"
    )

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(*server.address)
                writer.write(head.encode())
                while not writer.is_closing():
                    writer.write(b"1\r\n \r\n" * 4096)
                    await writer.drain()
            await asyncio.sleep(0.01)

    await asyncio.gather(*(one() for _ in range(number)))


async def reconnect(server: Server, key: str, number: int) -> None:
    """Connections that are opened and left again and again."""

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(*server.address)
                writer.write(f"GET /v1/models HTTP/1.1\r\nauthorization: Bearer {key}\r\n".encode())
                await writer.drain()
                writer.close()
            await asyncio.sleep(0.002)

    await asyncio.gather(*(one() for _ in range(number)))


async def slow_grammars(server: Server, key: str, number: int) -> None:
    """Schemas whose masks take long, and each time another one."""
    texts = {"type": "string", "pattern": "^((a|b|ab|ba|aab)+(c|cc)?)+$"}

    async def one(name: str) -> None:
        fields = {f"{name}{i}": texts for i in range(20)}
        branches = [{"type": "object", "properties": {**fields, str(i): texts}} for i in range(20)]
        form = {"type": "json_schema", "json_schema": {"name": name, "schema": {"anyOf": branches}}}
        chat = [{"role": "user", "content": "Write letters."}]
        body = {"model": MODEL, "messages": chat, "max_tokens": 200, "response_format": form}
        await http.post("/v1/chat/completions", json=body)

    async with server.client(key) as http:
        for start in range(0, sys.maxsize, number):
            await asyncio.gather(*(one(f"f{start + i}") for i in range(number)))


class WrongTree(TextProposer):
    """Drafts what the target hardly ever writes, as a tree of as many nodes as are asked for."""

    def draft(self, token_ids: Sequence[int], shape: Tree) -> DraftTree:
        draw = random.Random(len(token_ids))  # noqa: S311 - wrong tokens, no secret
        tokens = tuple(draw.randrange(100, 10_000) for _ in range(shape.total_tokens))
        return DraftTree(tokens, tuple((i - 1) // 2 for i in range(len(tokens))))


async def device_texts(
    server: Server, key: str, number: int, *, temperature: float = 0.0, stays_s: float = 600.0
) -> None:
    """Texts of 4,000 tokens of one device, drafted as trees; it leaves each after so long."""
    device = LocalDevice(device_target(), WrongTree())
    options = RemoteOptions(draft=Tree(2, 5, 30), draft_ahead=False, retry_s=120.0)

    async def one(place: int) -> None:
        for turn in range(10_000):
            draw = random.Random(100 * turn + place)  # noqa: S311 - a text, no secret
            prompt = [draw.randrange(100, 10_000) for _ in range(3900)]
            session = RemoteSession(device, transport(server, key), options)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(stays_s * draw.random() if stays_s < 60 else stays_s):
                    await session.generate(
                        prompt,
                        max_new_tokens=150,
                        temperature=temperature,
                        seed=turn,
                        stop_token_ids=(),
                    )
            await session.close()

    await asyncio.gather(*(one(place) for place in range(number)))


@functools.cache
def device_target() -> Target:
    """The parts that devices have."""
    return load_target(MODEL)


Flood = Callable[[Server], list[Awaitable[None]]]
FLOODS: dict[str, Flood] = {
    "long2": lambda server: [long_prompts(server, KEYS[1], 2, 6000)],
    "long8": lambda server: [long_prompts(server, KEYS[1], 8, 2500)],
    "long64": lambda server: [long_prompts(server, KEYS[1], 64, 2500)],
    "long8keys4": lambda server: [long_prompts(server, key, 8, 2500) for key in KEYS[1:5]],
    "scores8": lambda server: [long_prompts(server, KEYS[1], 8, 6000, echo=True, logprobs=1)],
    "n64": lambda server: [many_choices(server, KEYS[1], 64)],
    "unread64": lambda server: [unread(server, KEYS[1], 64)],
    "drip4": lambda server: [drip(server, "", 4)],
    "drip16key": lambda server: [drip(server, KEYS[1], 16)],
    "reconnect": lambda server: [reconnect(server, KEYS[1], 8)],
    "end8000": lambda server: [many_choices(server, KEYS[1], 8)],
    "grammars": lambda server: [slow_grammars(server, KEYS[1], 4)],
    "devices16": lambda server: [device_texts(server, KEYS[1], 16)],
    "devices16sampled": lambda server: [device_texts(server, KEYS[1], 16, temperature=1.0)],
    "devices-leave": lambda server: [device_texts(server, KEYS[1], 16, stays_s=4.0)],
}


@dataclass
class Seen:
    """What the honest client and a probe of `/health` saw."""

    waits_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)


Ask = Callable[[str], Awaitable[str]]
"""Sends one short chat and returns its text."""


@contextlib.asynccontextmanager
async def chats(server: Server) -> AsyncIterator[Ask]:
    """Short chats of the honest client over HTTP."""
    async with server.client(HONEST) as http:

        async def ask(text: str) -> str:
            body = {
                **{"model": MODEL, "messages": [{"role": "user", "content": text}]},
                **{"max_tokens": NEW_TOKENS, "temperature": 0},
            }
            answer = await http.post("/v1/chat/completions", json=body)
            answer.raise_for_status()
            return str(answer.json()["choices"][0]["message"]["content"])

        yield ask


@contextlib.asynccontextmanager
async def device_chats(server: Server) -> AsyncIterator[Ask]:
    """Short chats of an honest device, in one session."""
    options = RemoteOptions(draft=Chain(4), draft_ahead=False, retry_s=120.0)
    device = LocalDevice(device_target(), WrongTree())
    session = RemoteSession(device, transport(server, HONEST), options)

    async def ask(text: str) -> str:
        prompt = chat_ids(device_target(), text)
        found = await session.generate(prompt, max_new_tokens=NEW_TOKENS, stop_token_ids=())
        return str(found.token_ids)

    yield ask
    await session.close()


async def probe(server: Server, seen: Seen, ended: asyncio.Event, *, devices: bool) -> None:
    """Time what costs the server nothing."""
    async with server.client("") as http:
        while not ended.is_set():
            started = time.perf_counter()
            await (describe(server) if devices else http.get("/health"))
            seen.health_s.append(time.perf_counter() - started)
            await asyncio.sleep(0.05)


async def watch(server: Server, seconds: float, *, devices: bool, least: int = 4) -> Seen:
    """Short chats for so long, at least `least` of them, or until ten times as long has gone."""
    seen, ended = Seen(), asyncio.Event()
    probing = asyncio.create_task(probe(server, seen, ended, devices=devices))
    started = time.perf_counter()
    async with (device_chats if devices else chats)(server) as ask:
        while time.perf_counter() - started < seconds or len(seen.waits_s) < least:
            asked, text = time.perf_counter(), CHATS[len(seen.waits_s) % len(CHATS)]
            left_s = max(1.0, 10 * seconds - (asked - started))
            try:
                async with asyncio.timeout(left_s):
                    seen.texts.append((text, await ask(text)))
            except TimeoutError:
                seen.waits_s.append(time.perf_counter() - asked)
                break
            seen.waits_s.append(time.perf_counter() - asked)
            await asyncio.sleep(0.1)
    ended.set()
    probing.cancel()
    return seen


async def beside(server: Server, name: str, seconds: float) -> Seen:
    """What is seen while a flood goes on."""
    tasks = [asyncio.ensure_future(task) for task in FLOODS[name](server)]
    await asyncio.sleep(3.0)
    try:
        seen = await watch(server, seconds, devices="devices" in name)
        for task in tasks:
            if task.done():
                task.result()  # a flood that has failed is none
        return seen
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def row(name: str, seen: Seen, quiet: dict[str, str], server: Server) -> dict[str, Any]:
    """A line of the result; prints it."""
    found = {
        "flood": name,
        "chats": len(seen.texts),
        "median_s": round(median(seen.waits_s), 3),
        "longest_s": round(max(seen.waits_s), 3),
        "health_ms": round(1000 * max(seen.health_s, default=0.0), 1),
        "other_texts": sum(quiet.get(text, answer) != answer for text, answer in seen.texts),
        "peak_mib": round(server.peak_mib),
    }
    print(json.dumps(found), flush=True)
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The result in Markdown: a line for each flood, beside what was seen alone before it."""
    lines = [
        "| flood | alone | median, longest | `/health` | other texts |",
        "|---|---|---|---|---|",
    ]
    for alone, found in zip(rows[::2], rows[1::2], strict=True):
        waits = f"{found['median_s']:.2f}, {found['longest_s']:.2f} s"
        health = f"{found['health_ms']:.0f} ms"
        lines.append(
            f"| {found['flood']} | {alone['median_s']:.2f} s | {waits} | {health} "
            f"| {found['other_texts']} of {found['chats']} |"
        )
    return "\n".join(lines)


async def main(args: argparse.Namespace) -> None:
    """Each flood has a server of its own."""
    rows = []
    for name in args.floods:
        devices = "devices" in name
        async with (served_target if devices else served)(MODEL, args.port, args.options) as server:
            alone = await watch(server, args.seconds / 2, devices=devices)
            quiet = dict(alone.texts)
            rows.append(row("alone", alone, quiet, server))
            seen = await beside(server, name, args.seconds)
            rows.append(row(name, seen, quiet, server))
    found = {"model": MODEL, "machine": machine(torch.device("cpu")), "rows": rows}
    print(table(rows))
    report(found, args.out)


def server_parser(description: str, port: int) -> argparse.ArgumentParser:
    """Options of what starts a server."""
    options = argparse.ArgumentParser(description=description.splitlines()[0])
    options.add_argument("--port", type=int, default=port)
    options.add_argument("--out", type=Path, help="File for the result.")
    options.add_argument(
        "--options", type=shlex.split, default="--threads 1", help='Of the server: --options="..."'
    )
    return options


def report(found: Mapping[str, Any], out: Path | None) -> None:
    """Print a result, and write it."""
    if out is not None:
        out.write_text(json.dumps(found, indent=1))
    print(json.dumps(found))


if __name__ == "__main__":
    parser = server_parser(__doc__, 8137)
    parser.add_argument("model")
    parser.add_argument("--floods", nargs="+", choices=FLOODS, default=[*FLOODS])
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    MODEL = arguments.model
    asyncio.run(main(arguments))
