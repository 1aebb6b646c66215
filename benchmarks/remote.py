"""Many scripted clients on one server, batched and one by one; then the server's memory.

Only the server is measured: clients replay known texts, each draft right with a set probability,
so drafting costs nothing. Every text is compared with plain decoding. The last line is JSON.

    python benchmarks/remote.py --clients 32 --seconds 300
    python benchmarks/remote.py --tiny --clients 8 --seconds 5      # random weights
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

import moaspec
from moaspec.drafting.other_proposers.oracle_proposer import OracleProposer
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.protocol.websocket_transport import WebSocketTransport
from moaspec_edge.server.listeners.websocket_server import ServerOptions, TargetServer
from moaspec_edge.server.service import ServiceOptions, TargetService
from moaspec_edge.server.session_store import StoreOptions
from moaspec_edge.server.shared_verifier import PassCounts, PassOptions


@dataclass
class Client:
    """One scripted client: the same conversations over and over."""

    texts: Sequence[tuple[list[int], list[int]]]
    tokens: int = 0
    turns: int = 0
    verdict_s: list[float] = field(default_factory=list)

    async def run(self, session: RemoteSession, until_s: float, first: int) -> None:
        """Decode until it is time to stop."""
        while time.monotonic() < until_s:
            prompt, expected = self.texts[(first + self.turns) % len(self.texts)]
            seen = len(session.stats.rounds)
            async for event in session.stream(
                prompt, max_new_tokens=len(expected), stop_token_ids=()
            ):
                self.tokens += len(event.token_ids)
                if time.monotonic() >= until_s:
                    break
            else:
                assert session.result.token_ids == expected, (
                    "the text is not that of plain decoding"
                )
                self.turns += 1
            rounds = list(session.stats.rounds)[seen:]
            self.verdict_s += [one.received_s - one.sent_s for one in rounds if one.drafted]


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--one-by-one-seconds", type=float, default=None, help="default: a fifth")
    parser.add_argument("--agreement", type=float, default=0.75)
    parser.add_argument("--draft", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=1024, help="Of a session's text.")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args()


def load(args: argparse.Namespace) -> moaspec.Target:
    """The target that all of them use."""
    if not args.tiny:
        return moaspec.load_target("smollm2-135m", dtype=args.dtype)
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import tiny

    return tiny.target()


def texts(
    target: moaspec.Target, number: int, new_tokens: int
) -> list[tuple[list[int], list[int]]]:
    """Prompts and their texts by plain decoding."""
    generator = torch.Generator().manual_seed(0)
    most = min(target.vocab_size, 20_000)
    prompts = [
        torch.randint(5, most, (8 + 3 * (i % 8),), generator=generator).tolist()
        for i in range(number)
    ]
    results = moaspec.generate(target, prompts, max_new_tokens=new_tokens, stop_token_ids=())
    return [(p, r.token_ids) for p, r in zip(prompts, results, strict=True)]


async def measure(
    target: moaspec.Target,
    known: list[tuple[list[int], list[int]]],
    args: argparse.Namespace,
    *,
    max_rows: int,
    seconds: float,
) -> dict[str, Any]:
    """All clients at once, for so long."""
    passes = PassOptions(max_rows=max_rows)
    limits = StoreOptions(max_sessions=args.clients, max_sessions_per_owner=args.clients)
    # A session may grow to its limit, so a server takes no more of them than fit at their longest.
    most = min(args.max_tokens, target.max_positions)
    options = ServiceOptions(passes=passes, sessions=limits, max_tokens=most)
    service = TargetService(target, None, options)
    clients = [Client(known) for _ in range(args.clients)]
    async with TargetServer(service, ServerOptions(port=0)) as server:
        sessions = [
            session(target, known, args, number, server.url) for number in range(args.clients)
        ]
        memory = await decode(clients, sessions, seconds)
        for one in sessions:
            await one.close()
    return {
        "max_rows": max_rows,
        "seconds": seconds,
        **of_clients(clients, seconds),
        **of_passes(service.shared.counts, clients),
        "rss_mib": of_memory(memory),
    }


def session(
    target: moaspec.Target,
    known: list[tuple[list[int], list[int]]],
    args: argparse.Namespace,
    number: int,
    address: str,
) -> RemoteSession:
    """The session of one client, with replayed drafts."""
    # One process plays all clients and the server; a request that waits for long is not lost.
    options = RemoteOptions(draft=Chain(args.draft), draft_ahead=False, retry_s=5.0)
    replay = OracleProposer([[*p, *t] for p, t in known], agreement=args.agreement, seed=number)
    return RemoteSession(LocalDevice(target, replay), WebSocketTransport(address), options)


async def decode(
    clients: Sequence[Client], sessions: Sequence[RemoteSession], seconds: float
) -> list[int]:
    """Let all clients decode; returns the process's memory as it was meanwhile, in bytes."""
    until_s, process = time.monotonic() + seconds, psutil.Process()
    running = [
        asyncio.create_task(client.run(one, until_s, number))
        for number, (client, one) in enumerate(zip(clients, sessions, strict=True))
    ]
    memory: list[int] = []
    while not all(task.done() for task in running):
        await asyncio.sleep(min(1.0, seconds / 10))
        memory.append(process.memory_info().rss)
    await asyncio.gather(*running)
    return memory


def of_clients(clients: Sequence[Client], seconds: float) -> dict[str, Any]:
    """Tokens, and seconds per verdict."""
    tokens = [client.tokens for client in clients]
    verdicts = sorted(s for client in clients for s in client.verdict_s)
    return {
        "tokens_per_s": sum(tokens) / seconds,
        "tokens_by_client": {"least": min(tokens), "most": max(tokens)},
        "turns": sum(client.turns for client in clients),
        "verdict_ms": {
            "p50": 1e3 * verdicts[len(verdicts) // 2],
            "p99": 1e3 * verdicts[int(len(verdicts) * 0.99)],
        },
    }


def of_passes(counts: PassCounts, clients: Sequence[Client]) -> dict[str, float]:
    """How many requests and tokens shared a pass."""
    passes = max(1, counts.passes)
    return {
        "rows_per_pass": counts.rows / passes,
        "tokens_per_pass": sum(client.tokens for client in clients) / passes,
        "pass_ms": 1e3 * counts.seconds / passes,
    }


def of_memory(memory: Sequence[int]) -> dict[str, float]:
    """MiB in the middle and at the end: texts of the second half must leave nothing behind."""
    half = memory[len(memory) // 2 :]
    return {
        "half": half[0] / 2**20,
        "end": half[-1] / 2**20,
        "median": statistics.median(memory) / 2**20,
    }


def main() -> None:
    """Measure one by one, then together."""
    args = parse()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    target = load(args)
    known = texts(target, min(args.clients, 8), args.new_tokens)
    alone_s = args.one_by_one_seconds or args.seconds / 5
    one_by_one = asyncio.run(measure(target, known, args, max_rows=1, seconds=alone_s))
    batched = asyncio.run(measure(target, known, args, max_rows=64, seconds=args.seconds))
    gain = batched["tokens_per_s"] / one_by_one["tokens_per_s"]
    for name, data in (("one by one", one_by_one), ("batched", batched)):
        verdict = data["verdict_ms"]
        print(
            f"{name:11} {data['tokens_per_s']:7.1f} tokens/s, {data['rows_per_pass']:.1f} rows a "
            f"pass, verdict p50 {verdict['p50']:.0f} ms, p99 {verdict['p99']:.0f} ms, tokens of a "
            f"client {data['tokens_by_client']['least']}..{data['tokens_by_client']['most']}"
        )
    print(f"batched over one by one: {gain:.2f}")
    data = {"torch": torch.__version__, "threads": torch.get_num_threads(), "dtype": args.dtype}
    print(json.dumps({"one_by_one": one_by_one, "batched": batched, "gain": gain, **data}))


if __name__ == "__main__":
    main()
