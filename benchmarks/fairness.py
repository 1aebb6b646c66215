"""What an honest client waits beside floods of others, and what its server's `/health` does.

One server with a key for each client. The honest client sends short chats, one after another,
alone and then beside each flood; a text that differs from the one alone is counted. Several floods
of one kind have a key each. To compare versions, run it with each one's packages first in
PYTHONPATH. The last line is JSON.

Usage: python benchmarks/fairness.py smollm2-135m [--floods long2 n64] [--seconds 20]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx

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
    try:
        async with server.client("") as http:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    await http.get("/health")
                    break
                if process.poll() is not None:
                    raise SystemExit("The server did not start.")
                await asyncio.sleep(0.2)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()


def long_prompt(number: int, words: int) -> str:
    """A text that shares no beginning with another."""
    draw = random.Random(number)  # noqa: S311 - words, no secret
    return f"{number} " + " ".join(draw.choice(WORDS) for _ in range(words))


async def post(http: httpx.AsyncClient, **body: Any) -> None:
    """A completion whose answer nobody looks at."""
    await http.post("/v1/completions", json={"model": MODEL, "temperature": 0, **body})


async def long_prompts(server: Server, key: str, number: int, words: int) -> None:
    """So many long prompts at once, again and again."""
    start = 0
    async with server.client(key) as http:
        while True:
            wave = range(start, start + number)
            await asyncio.gather(
                *(post(http, prompt=long_prompt(i, words), max_tokens=1) for i in wave)
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


Flood = Callable[[Server], list[Awaitable[None]]]
FLOODS: dict[str, Flood] = {
    "long2": lambda server: [long_prompts(server, KEYS[1], 2, 6000)],
    "long8": lambda server: [long_prompts(server, KEYS[1], 8, 2500)],
    "long64": lambda server: [long_prompts(server, KEYS[1], 64, 2500)],
    "long8keys4": lambda server: [long_prompts(server, key, 8, 2500) for key in KEYS[1:5]],
    "n64": lambda server: [many_choices(server, KEYS[1], 64)],
    "unread64": lambda server: [unread(server, KEYS[1], 64)],
    "drip4": lambda server: [drip(server, "", 4)],
    "drip16key": lambda server: [drip(server, KEYS[1], 16)],
    "reconnect": lambda server: [reconnect(server, KEYS[1], 8)],
}


@dataclass
class Seen:
    """What the honest client and a probe of `/health` saw."""

    waits_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)


async def watch(server: Server, seconds: float, least: int = 4) -> Seen:
    """Short chats for so long, at least `least` of them, or until ten times as long has gone."""
    seen, ended = Seen(), asyncio.Event()

    async def health() -> None:
        async with server.client("") as http:
            while not ended.is_set():
                started = time.perf_counter()
                await http.get("/health")
                seen.health_s.append(time.perf_counter() - started)
                await asyncio.sleep(0.05)

    async def chat(http: httpx.AsyncClient, text: str) -> str:
        body = {
            **{"model": MODEL, "messages": [{"role": "user", "content": text}]},
            **{"max_tokens": NEW_TOKENS, "temperature": 0},
        }
        answer = await http.post("/v1/chat/completions", json=body)
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["message"]["content"])

    probe, started = asyncio.create_task(health()), time.perf_counter()
    async with server.client(HONEST) as http:
        while time.perf_counter() - started < seconds or len(seen.waits_s) < least:
            asked, text = time.perf_counter(), CHATS[len(seen.waits_s) % len(CHATS)]
            left_s = max(1.0, 10 * seconds - (asked - started))
            try:
                async with asyncio.timeout(left_s):
                    seen.texts.append((text, await chat(http, text)))
            except TimeoutError:
                seen.waits_s.append(time.perf_counter() - asked)
                break
            seen.waits_s.append(time.perf_counter() - asked)
            await asyncio.sleep(0.1)
    ended.set()
    probe.cancel()
    return seen


async def beside(server: Server, flood: Flood, seconds: float) -> Seen:
    """What is seen while a flood goes on."""
    tasks = [asyncio.ensure_future(task) for task in flood(server)]
    await asyncio.sleep(3.0)
    try:
        return await watch(server, seconds)
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


async def main(args: argparse.Namespace) -> None:
    """Each flood has a server of its own."""
    rows = []
    for name in args.floods:
        async with served(args.model, args.port, args.options) as server:
            alone = await watch(server, args.seconds / 2)
            quiet = dict(alone.texts)
            rows.append(row("alone", alone, quiet, server))
            seen = await beside(server, FLOODS[name], args.seconds)
            rows.append(row(name, seen, quiet, server))
    print(json.dumps({"model": args.model, "rows": rows}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--floods", nargs="+", choices=FLOODS, default=[*FLOODS])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--port", type=int, default=8137)
    parser.add_argument("--options", nargs="*", default=["--threads", "1"])
    arguments = parser.parse_args()
    MODEL = arguments.model
    asyncio.run(main(arguments))
