"""Many streaming clients at once: fair, each text what it is alone, cancelled ones without a trace.

A real server in this process, and as many clients, which all ask at the same moment; every second
one samples. Then the same again, but every second client leaves after its first tokens. Reported
are tokens per second, how far the clients' speeds are apart among those that wrote all their
tokens, texts that differ from plain decoding alone (near-ties of float32 apart), and the cache's
bytes after either run. The last line is JSON; exit code 1 says that something does not hold.

    python tests/soak/serve_many.py --model tiny
    python tests/soak/serve_many.py --max-new-tokens 32 --threads 2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from common import load, parser, setting, spread, trusted

import moaspec
import serving
from moaspec import Target
from moaspec.evaluate.correctness.equality import judge
from moaspec.evaluate.prompt_suites import read_prompts
from moaspec.generation.shaping import shaping_for
from moaspec_core.cli.prompts import chat_ids
from moaspec_core.sampling.params import SamplingParams
from moaspec_serve.sources.engine_worker import WorkerLimits
from moaspec_serve.sources.local_source import LocalSource
from serving import Served

FAIR = 2.0
"""The fastest client may be so many times as fast as the slowest."""

LEAVE_AFTER = 3
"""Chunks after which a client of the second run leaves."""

PATIENCE_S = 60.0
"""For rows of clients that left; a step of the engine takes a second at most."""


@dataclass
class Client:
    """What one client asked for, and saw."""

    number: int
    prompt_ids: list[int]
    leaves: bool = False
    ids: list[int] = field(default_factory=list)
    first_s: float = 0.0
    last_s: float = 0.0

    @property
    def sampling(self) -> dict[str, Any]:
        """Every second one samples."""
        return {"temperature": 0.8, "seed": self.number} if self.number % 2 else {"temperature": 0}

    @property
    def tokens_per_second(self) -> float:
        """From when all began until its last token."""
        return len(self.ids) / self.last_s


def main() -> None:
    """Serve, ask, compare, report."""
    options = parser(__doc__, dtype="float32")
    options.add_argument("--num", type=int, default=64)
    options.add_argument("--max-new-tokens", type=int, default=32)
    options.add_argument("--tree", default="auto")
    args = options.parse_args()
    target, source = _source(args)
    prompts = _prompts(args, target)
    with serving.serving(source) as served:
        asyncio.run(_ask_all(served, _clients(prompts[:2]), 2))  # untimed
        everyone = _clients(prompts)
        asyncio.run(_ask_all(served, everyone, args.max_new_tokens))
        held = source.cache.num_bytes
        leaving = _clients(prompts, leave=True)
        asyncio.run(_ask_all(served, leaving, args.max_new_tokens))
        left_s = _until_idle(source)
        held_after = source.cache.num_bytes
    staying = [client for client in leaving if not client.leaves]
    values = _speeds(everyone, args.max_new_tokens) | {
        "wrong": _wrong(args, target, [*everyone, *staying]),
        "left": len(leaving) - len(staying),
        "left_s": left_s,
        "rows_left": source.engine.num_active,
        "cache_bytes": held,
        "cache_bytes_after_cancelling": held_after,
    }
    holds = not values["wrong"] and values["apart"] <= FAIR and values["finished"] == args.num
    holds = holds and not values["rows_left"] and held_after <= held
    _print(values)
    print(json.dumps({**vars(args), **setting(target), **values, "holds": holds}))
    sys.exit(not holds)


def _source(args: argparse.Namespace) -> tuple[Target, LocalSource]:
    """Nothing is kept between texts, so that what the cache holds is what rows hold."""
    if args.model == "tiny":
        return serving.target(), serving.source(active=args.num, parked=0)
    target, drafter = load(args)
    shaping = shaping_for(target, drafter, tree=args.tree, free_branches="auto")
    limits = WorkerLimits(active=args.num, parked=0)
    return target, LocalSource(target, drafter, shaping=shaping, limits=limits)


def _prompts(args: argparse.Namespace, target: Target) -> list[list[int]]:
    """One for each client, none like another."""
    texts = [prompt.turns[0] for prompt in read_prompts("bundled")]
    return [chat_ids(target, f"{texts[i % len(texts)]} ({i})") for i in range(args.num)]


def _clients(prompts: Sequence[list[int]], *, leave: bool = False) -> list[Client]:
    # Neighbours in the order of arrival, one of whom samples, stay or leave together.
    return [
        Client(number, prompt_ids, leaves=leave and number // 2 % 2 == 1)
        for number, prompt_ids in enumerate(prompts)
    ]


async def _ask_all(served: Served, clients: Sequence[Client], max_new_tokens: int) -> None:
    limits = httpx.Limits(max_connections=len(clients))
    body = {"model": served.source.info.name, "max_tokens": max_new_tokens, "stream": True}
    body["moaspec"] = {"sources": True}
    async with httpx.AsyncClient(base_url=served.url, timeout=3600, limits=limits) as http:
        started_s = time.perf_counter()
        await asyncio.gather(*(_ask(http, client, body, started_s) for client in clients))


async def _ask(
    http: httpx.AsyncClient, client: Client, body: dict[str, Any], started_s: float
) -> None:
    body = {**body, "prompt": client.prompt_ids, **client.sampling}
    chunks = 0
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            client.last_s = time.perf_counter() - started_s
            client.first_s = client.first_s or client.last_s
            said = json.loads(line[6:])["moaspec"]
            client.ids += [piece["id"] for piece in said.get("pieces", ())]
            chunks += 1
            if client.leaves and chunks == LEAVE_AFTER:
                return


def _until_idle(source: LocalSource) -> float:
    """Seconds until no row is decoded any more."""
    started_s = time.perf_counter()
    while source.load.active + source.load.waiting:
        if time.perf_counter() - started_s > PATIENCE_S:
            break
        time.sleep(0.01)
    return time.perf_counter() - started_s


def _speeds(clients: Sequence[Client], max_new_tokens: int) -> dict[str, Any]:
    """Only those that wrote all their tokens did the same work."""
    speeds = [one.tokens_per_second for one in clients if len(one.ids) == max_new_tokens]
    total_s = max(client.last_s for client in clients)
    return {
        "finished": sum(bool(client.ids) for client in clients),
        "full_length": len(speeds),
        "tokens_per_second": sum(len(client.ids) for client in clients) / total_s,
        "of_one_client": spread(speeds),
        "apart": max(speeds) / min(speeds),
        "first_token_s": spread([client.first_s for client in clients]),
    }


def _wrong(args: argparse.Namespace, target: Target, clients: Sequence[Client]) -> list[int]:
    """Numbers of clients whose text is not what plain decoding writes alone."""
    known: dict[int, list[int]] = {}
    wrong = []
    judging = trusted(args, target)
    for client in clients:
        if client.number not in known:
            alone = moaspec.generate(
                target, client.prompt_ids, max_new_tokens=args.max_new_tokens, **client.sampling
            )
            known[client.number] = alone.token_ids
        found = judge(
            judging,
            client.prompt_ids,
            known[client.number],
            client.ids,
            SamplingParams(**client.sampling),
            max_new_tokens=args.max_new_tokens,
        )
        if not found.lossless:
            wrong.append(client.number)
    return wrong


def _print(values: dict[str, Any]) -> None:
    one, first = values["of_one_client"], values["first_token_s"]
    print(f"{values['finished']} clients finished, {values['full_length']} wrote all their tokens")
    print(f"{values['tokens_per_second']:.1f} tokens/s together, {one['median']:.2f} each")
    print(f"fastest / slowest: {values['apart']:.2f}; first token after {first['median']:.2f} s")
    print(f"texts that differ from decoding alone: {len(values['wrong'])}")
    print(
        f"{values['left']} of the second run left: {values['rows_left']} rows active "
        f"{values['left_s']:.2f} s later; the cache holds {values['cache_bytes'] / 2**20:.1f} MiB, "
        f"and {values['cache_bytes_after_cancelling'] / 2**20:.1f} MiB after that"
    )


if __name__ == "__main__":
    main()
