"""Bytes on the wire beside the arithmetic, and the loss of tau by the codecs.

It measures bytes of activations per verified token beside the size of a record, and tau of the same
greedy texts with unchanged activations and in each codec. Of a prompt of 512 tokens over an
emulated link, it counts the activations that the device had when it first sent drafts. The last
line is JSON.

    python benchmarks/remote_wire.py --prompts 12 --new-tokens 64
    python benchmarks/remote_wire.py --tiny      # random weights
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import moaspec
from moaspec.evaluate.prompt_suites import read_prompts
from moaspec.model.moa import MoADrafter
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.emulation import ShapedTransport, link_named
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol import wire
from moaspec_edge.protocol.activation_layout import ActivationLayout
from moaspec_edge.protocol.codec import CODECS, Codec
from moaspec_edge.protocol.transport import Connection, InProcessTransport, Transport
from moaspec_edge.server.service import TargetService

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import tiny
from edge_bench.processes import prompt_ids

RETRY_S = 30.0
"""Nothing is lost here, so a request that a busy machine answers late is sent once."""
SHAPE = Chain(4)
LLAMA_3_8B = (8, 128)
"""Heads of CA's key and value together, and their width."""
LONG = 512


class Tap:
    """A transport that shows every frame to somebody.

    Args:
        inner: makes the connections.
        up, down: told of each frame as it leaves the device, and as it arrives there.
    """

    def __init__(
        self, inner: Transport, up: Callable[[bytes], None], down: Callable[[bytes], None]
    ) -> None:
        self._inner, self.up, self.down = inner, up, down

    async def connect(self) -> Connection:
        """Connect the inner transport; see `Transport`."""
        return _Tapped(self, await self._inner.connect())


class _Tapped:
    def __init__(self, tap: Tap, inner: Connection) -> None:
        self._tap, self._inner = tap, inner
        self.close = inner.close

    async def send(self, frame: bytes) -> None:
        self._tap.up(frame)
        await self._inner.send(frame)

    async def receive(self) -> bytes:
        frame = await self._inner.receive()
        self._tap.down(frame)
        return frame


class Arrivals:
    """How many of a prompt's activations had come when drafts were first sent."""

    def __init__(self) -> None:
        self.positions: set[int] = set()
        self.at_first_draft: int | None = None

    def up(self, frame: bytes) -> None:
        """A frame of the device."""
        if self.at_first_draft is None and wire.parse_client(frame).draft.tokens:
            self.at_first_draft = len(self.positions)

    def down(self, frame: bytes) -> None:
        """A frame of the server."""
        message = wire.parse(frame, pb.ServerMessage())
        for one in (message.activations, message.verdict.activations):
            self.positions.update(range(one.start, one.start + one.count))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--link", default="4g")
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args()


def load(args: argparse.Namespace) -> tuple[moaspec.Target, MoADrafter, list[list[int]]]:
    """Target, drafter and prompts."""
    if args.tiny:
        return (
            tiny.target(),
            tiny.agreeing_drafter("llama"),
            [list(prompt) for prompt in tiny.PROMPTS],
        )
    target = moaspec.load_target("smollm2-135m", dtype="float32")
    drafter = moaspec.load_drafter("smollm2-135m", target=target)
    turns = [prompt.turns[0] for prompt in read_prompts("bundled", limit=args.prompts)]
    return target, drafter, [prompt_ids(target.tokenizer, turn) for turn in turns]


async def decoded(
    target: moaspec.Target,
    drafter: MoADrafter,
    prompts: list[list[int]],
    new_tokens: int,
    **options: Any,
) -> list[RemoteSession]:
    """One session for each prompt, after its text."""
    service = TargetService(target, drafter)
    sessions = []
    for prompt in prompts:
        remote = RemoteOptions(draft=SHAPE, draft_ahead=False, retry_s=RETRY_S, **options)
        sessions.append(
            RemoteSession(LocalDevice(target, drafter), InProcessTransport(service), remote)
        )
        await sessions[-1].generate(prompt, max_new_tokens=new_tokens, stop_token_ids=())
        await sessions[-1].close()
    await service.stop()
    return sessions


def tau(results: list[moaspec.GenerationResult]) -> float:
    """Tokens of all rounds over their number."""
    lengths = [length for result in results for length in result.accept_lengths]
    return sum(lengths) / len(lengths)


def codecs(
    target: moaspec.Target, drafter: MoADrafter, prompts: list[list[int]], new_tokens: int
) -> dict[str, Any]:
    """Tau and bytes of every codec, beside tau without any."""
    local = [
        moaspec.generate(
            target,
            prompt,
            drafter=drafter,
            max_new_tokens=new_tokens,
            tree=SHAPE,
            stop_token_ids=(),
        )
        for prompt in prompts
    ]
    found: dict[str, Any] = {"local": {"tau": tau(local)}}
    for name in CODECS:
        sessions = asyncio.run(decoded(target, drafter, prompts, new_tokens, codec=name))
        results = [session.result for session in sessions]
        assert [r.token_ids for r in results] == [r.token_ids for r in local]
        found[name] = {"tau": tau(results), "loss": 1.0 - tau(results) / found["local"]["tau"]}
        print(f"{name}: tau {tau(results):.3f}, local {found['local']['tau']:.3f}", flush=True)
    return found


def sizes(
    target: moaspec.Target, drafter: MoADrafter, prompt: list[int], new_tokens: int
) -> list[dict[str, Any]]:
    """Bytes of activations per token that was read, beside a record's; and all others."""
    found = []
    for layers in (0, 1, 3):
        for name in CODECS:
            (session,) = asyncio.run(
                decoded(target, drafter, [prompt], new_tokens, codec=name, num_target_layers=layers)
            )
            stats = session.stats
            record = ActivationLayout.of(drafter.config, name, layers, target.head_dim).token_bytes
            # Every token but the newest has been read; the last rounds' may still be under way.
            read = len(prompt) + len(session.result.token_ids) - 1
            row = {
                "codec": name,
                "num_target_layers": layers,
                "record": record,
                "measured": stats.activation_bytes / read,
                "other_down": (stats.bytes_down - stats.activation_bytes) / new_tokens,
                "up": stats.bytes_up / new_tokens,
            }
            found.append(row)
            print(
                f"{name} N={layers}: {row['measured']:.0f} bytes of activations a token, a record "
                f"is {record}; {row['other_down']:.0f} others down and {row['up']:.0f} up per "
                "generated token",
                flush=True,
            )
    return found


async def first_draft(
    target: moaspec.Target, drafter: MoADrafter, link: str, layers: int
) -> dict[str, Any]:
    """A long prompt: drafts leave before its activations have arrived."""
    length = min(LONG, target.max_positions - 16)
    prompt = torch.randint(5, min(target.vocab_size, 20_000), (length,)).tolist()
    arrivals = Arrivals()
    service = TargetService(target, drafter)
    shaped = ShapedTransport(InProcessTransport(service), link_named(link))
    transport = Tap(shaped, arrivals.up, arrivals.down)
    options = RemoteOptions(num_target_layers=layers, draft=SHAPE, retry_s=RETRY_S)
    session = RemoteSession(LocalDevice(target, drafter), transport, options)
    await session.generate(prompt, max_new_tokens=8, stop_token_ids=())
    await session.close()
    await service.stop()
    return {"prompt": length, "link": link, "had_at_first_draft": arrivals.at_first_draft}


def main() -> None:
    """Measure and print the figures."""
    args = parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    target, drafter, prompts = load(args)
    llama = {name: Codec(name, *LLAMA_3_8B).token_bytes for name in CODECS}
    print(f"Llama-3-8B, bytes of a record: {llama}")
    bytes_ = sizes(target, drafter, prompts[0], args.new_tokens)
    early = asyncio.run(first_draft(target, drafter, args.link, 3))
    print(
        f"prompt of {early['prompt']} tokens over {early['link']}: "
        f"{early['had_at_first_draft']} activations were there when the first draft left"
    )
    costs = codecs(target, drafter, prompts, args.new_tokens)
    data = {"llama_3_8b": llama, "bytes": bytes_, "long_prompt": early, "tau": costs}
    print(json.dumps({**data, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
