"""A server whose cache is full: its memory, its texts, and what faults do to it.

`memory`: peak resident memory beyond that of a server that has answered once, for each size of the
cache, under a flood of long prompts with many choices. `equal`: texts of three keys, greedy and
sampled, all at once where few of them have room, and from a server where all have; they must be the
same. `faults`: floods that begin and end, connections that are cut, and servers that are killed,
for so long; an honest client asks again until it is answered, and its texts must be those of a
quiet server. The last line is JSON.

Usage: python benchmarks/full_cache.py memory smollm2-135m --gib 1 2 4 --seconds 60
       python benchmarks/full_cache.py equal smollm2-135m --texts 48 --gib 0.1
       python benchmarks/full_cache.py faults smollm2-135m --seconds 1200
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import time
from pathlib import Path
from typing import Any

import fairness
import httpx
from fairness import FLOODS, KEYS, Server, long_prompt, post, served

KILL_S, FLOOD_S = 60.0, 12.0
"""Mean seconds between two kills of a server, and seconds of a flood."""
HTTP_FLOODS = [name for name in FLOODS if "devices" not in name]


def resident(server: Server, field: str = "VmRSS") -> float:
    """GiB of a server's memory: now, or the peak (VmHWM)."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) / 2**20


async def counter(server: Server, name: str) -> float:
    """A figure of the server's metrics, summed over its labels."""
    async with server.client(KEYS[0]) as http:
        lines = (await http.get("/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


async def answered(server: Server, key: str, body: dict[str, Any]) -> str:
    """The text of a completion."""
    async with server.client(key) as http:
        answer = await http.post("/v1/completions", json={"model": fairness.MODEL, **body})
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["text"])


async def memory(args: argparse.Namespace) -> list[dict[str, float]]:
    """A row for each size of the cache."""
    rows = []
    for gib in args.gib:
        options = [*args.options, "--cache-gib", str(gib)]
        async with served(fairness.MODEL, args.port, options) as server:
            await answered(server, KEYS[0], {"prompt": "Once " * 800, "max_tokens": 8})
            before, most = resident(server), 0.0
            flood = asyncio.gather(*(many_long(server, key) for key in KEYS[1:5]))
            until = time.monotonic() + args.seconds * gib
            while time.monotonic() < until:
                most = max(most, await counter(server, "moaspec_owner_cache_bytes{"))
                await asyncio.sleep(0.5)
            flood.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await flood
            row = {
                "gib": gib,
                "counted_gib": round(most / 2**30, 3),
                "peak_gib": round(resident(server, "VmHWM") - before, 3),
                "set_back": await counter(server, "moaspec_rows_set_back_total"),
            }
            rows.append(row | {"of_the_limit": round(row["peak_gib"] / gib, 3)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


async def many_long(server: Server, key: str) -> None:
    """Long prompts with several choices each, again and again."""
    number = 0
    async with server.client(key) as http:
        while True:
            number += 1
            prompt = long_prompt(1000 * KEYS.index(key) + number, 2500)
            await post(http, prompt=prompt, n=8, max_tokens=4000, ignore_eos=True, temperature=1)


async def equal(args: argparse.Namespace) -> dict[str, Any]:
    """Differences between the texts of a server with little room and of a quiet one."""
    bodies = [
        {
            "prompt": long_prompt(number, 60 + 7 * (number % 40)),
            "max_tokens": 96,
            "ignore_eos": True,
            "temperature": 0.8 * (number % 2),
            "seed": number,
        }
        for number in range(args.texts)
    ]

    async def texts(gib: float, at_once: int) -> tuple[list[str], float]:
        options = [*args.options, "--cache-gib", str(gib)]
        turns = asyncio.Semaphore(at_once)

        async def one(number: int) -> str:
            async with turns:
                return await answered(server, KEYS[1 + number % 3], bodies[number])

        async with served(fairness.MODEL, args.port, options) as server:
            found = await asyncio.gather(*(one(number) for number in range(args.texts)))
            return found, await counter(server, "moaspec_rows_set_back_total")

    (quiet, _), (full, set_back) = await texts(8.0, 4), await texts(args.gib[0], args.texts)
    differing = sum(one != other for one, other in zip(quiet, full, strict=True))
    return {"texts": args.texts, "differing": differing, "set_back": set_back}


async def faults(args: argparse.Namespace) -> dict[str, Any]:
    """Kills, cuts and floods together."""
    draw = random.Random(args.seed)  # noqa: S311 - what happens when, no secret
    options = [*args.options, "--cache-gib", str(args.gib[0])]
    found = {"texts": 0, "other_texts": 0, "kills": 0, "floods": 0}
    until, quiet = time.monotonic() + args.seconds, dict[str, str]()
    while time.monotonic() < until:
        async with served(fairness.MODEL, args.port, options) as server:
            if not quiet:
                for text in fairness.CHATS:
                    quiet[text] = await honest(server, text)
            lives_s = min(draw.expovariate(1 / KILL_S), max(0.0, until - time.monotonic()))
            flooding = asyncio.create_task(floods(server, draw, found))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(lives_s):
                    while True:
                        text = draw.choice(fairness.CHATS)
                        found["other_texts"] += quiet[text] != await honest(server, text)
                        found["texts"] += 1
            flooding.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await flooding
            server.process.kill()  # in the middle of its work
            found["kills"] += 1
    return found | await memory_afterwards(args, options, draw)


async def memory_afterwards(
    args: argparse.Namespace, options: list[str], draw: random.Random
) -> dict[str, float]:
    """GiB before floods and after them, when caches are free again."""
    async with served(fairness.MODEL, args.port, options) as server:
        for name in ("long8", "n64"):  # libraries and buffers have their sizes afterwards
            await flooded(server, name, args.settle)
        before, seen = resident(server), {"floods": 0}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(4 * args.settle):
                await floods(server, draw, seen)
        await flooded(server, "long8", args.settle)
        return {"before_gib": round(before, 3), "after_gib": round(resident(server), 3)}


async def flooded(server: Server, name: str, seconds: float) -> None:
    """One flood for so long, and a quiet moment."""
    tasks = [asyncio.ensure_future(task) for task in FLOODS[name](server)]
    try:
        await asyncio.sleep(seconds)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(seconds / 4)


async def floods(server: Server, draw: random.Random, found: dict[str, int]) -> None:
    """One flood after another, and connections that are cut meanwhile."""
    while True:
        found["floods"] += 1
        cutting = asyncio.create_task(cuts(server, draw))
        try:
            await flooded(server, draw.choice(HTTP_FLOODS), FLOOD_S * draw.random())
        finally:
            cutting.cancel()


async def cuts(server: Server, draw: random.Random) -> None:
    """Streams whose clients leave in the middle."""
    body = {"model": fairness.MODEL, "prompt": "Once", "max_tokens": 400, "stream": True}
    while True:
        with contextlib.suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(draw.random()), server.client(KEYS[2]) as http:
                await http.post("/v1/completions", json=body)
        await asyncio.sleep(0.05)


async def honest(server: Server, text: str) -> str:
    """A short chat of the honest client."""
    async with fairness.chats(server) as ask:
        return await ask(text)


def main() -> None:
    """Run one part and print its result."""
    parser = fairness.server_parser(__doc__, 8138)
    parts = {"memory": memory, "equal": equal, "faults": faults}
    parser.add_argument("part", choices=parts)
    parser.add_argument("model")
    parser.add_argument("--gib", type=float, nargs="+", default=[1.0])
    parser.add_argument("--seconds", type=float, default=60.0, help="Of memory: for each GiB.")
    parser.add_argument("--settle", type=float, default=20.0, help="Of faults: seconds of a flood.")
    parser.add_argument("--texts", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    fairness.MODEL = args.model
    found = {"part": args.part, "model": args.model, "result": asyncio.run(parts[args.part](args))}
    fairness.report(found, args.out)


if __name__ == "__main__":
    main()
