"""Hostile frames: at least 100,000 against a server, and as many against a device's parser.

Noise, mutations, truncations, replays, lies about lengths, and messages for other people's
sessions. An honest client decodes beside the attack; its texts must stay those of plain decoding,
no error but this package's own may come up, and memory must return to where it was. Then frames and
records of activations as a hostile server would send them. The last line is JSON.

    python tests/soak/remote_fuzz.py --frames 100000
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import torch

import moaspec
from moaspec.model.checkpoint.moa_checkpoint import fingerprint
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.errors import LinkError, MoaSpecError
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol import wire
from moaspec_edge.protocol.activation_layout import ActivationLayout
from moaspec_edge.protocol.codec import CODECS
from moaspec_edge.protocol.transport import Connection, InProcessTransport, pipe
from moaspec_edge.server.service import TargetService

sys.path.insert(0, str(Path(__file__).parents[1]))
import tiny
from hostile import Hostile
from links import patient_link


async def attack(service: TargetService, hostile: Hostile, frames: int) -> Counter[str]:
    """Connections that each live until a frame of theirs is refused."""
    ends: Counter[str] = Counter()
    sent = 0
    while sent < frames:
        near, far = pipe()
        serving = asyncio.create_task(service.converse("mallory", far))
        reading = asyncio.create_task(read_all(near))
        while not serving.done() and sent < frames:
            try:
                await near.send(hostile.frame())
            except LinkError:
                break
            sent += 1
            await asyncio.sleep(0)
        await near.close()
        await asyncio.gather(serving, return_exceptions=True)
        error = serving.exception()
        assert isinstance(error, MoaSpecError), f"not one of our errors: {error!r}"
        ends[type(error).__name__] += 1
        await reading
    return ends


async def read_all(connection: Connection) -> None:
    """Read what nobody wants to know."""
    try:
        while True:
            await connection.receive()
    except LinkError:
        return


def against_the_device(frames: int, seed: int) -> Counter[str]:
    """Messages and activations of a hostile server: a message, numbers, or an error of ours."""
    chance, ends = random.Random(seed), Counter[str]()
    target = tiny.target()
    layouts = [
        ActivationLayout.of(tiny.agreeing_drafter("llama").config, codec, layers, target.head_dim)
        for codec in CODECS
        for layers in (0, 2)
    ]
    for _ in range(frames):
        layout, count = chance.choice(layouts), chance.randrange(4)
        wrong = chance.choice((0, 0, 0, 1, -1, 7, -count * layout.token_bytes))
        data = chance.randbytes(max(0, count * layout.token_bytes + wrong))
        told = pb.Activations(start=chance.getrandbits(32), count=count, data=data)
        frame = bytearray(pb.ServerMessage(session=bytes(16), activations=told).SerializeToString())
        for _ in range(chance.randrange(3)):
            frame[chance.randrange(len(frame))] = chance.randrange(256)
        try:
            message = wire.parse(bytes(frame), pb.ServerMessage()).activations
            parts = layout.decode(message.data, message.count)
            assert all(np.isfinite(part).all() for part in parts if part is not None)
            ends["read"] += 1
        except MoaSpecError as error:
            ends[type(error).__name__] += 1
    return ends


async def run(args: argparse.Namespace) -> dict[str, object]:
    """The attack, and an honest client beside it."""
    target, drafter = tiny.target(), tiny.agreeing_drafter("llama")
    service = TargetService(target, drafter)
    hostile = Hostile(target, fingerprint(drafter), args.seed)
    await attack(service, hostile, 2000)  # warm-up: allocators and caches
    gc.collect()
    before = psutil.Process().memory_info().rss
    options = RemoteOptions(draft=Chain(2))
    honest = RemoteSession(
        LocalDevice(target, drafter), InProcessTransport(service, "alice"), options
    )
    started = time.monotonic()
    attacking = asyncio.create_task(attack(service, hostile, args.frames))
    texts = 0
    while not attacking.done():
        prompt = tiny.PROMPTS[texts % len(tiny.PROMPTS)]
        result = await honest.generate(prompt, max_new_tokens=12)
        assert result.token_ids == list(tiny.own_texts("llama")[texts % len(tiny.PROMPTS)][:12])
        texts += 1
    ends = await attacking
    await honest.close()
    await service.stop()
    gc.collect()
    return {
        "frames": args.frames,
        "seconds": time.monotonic() - started,
        "connections": sum(ends.values()),
        "ended_by": dict(ends),
        "against_the_device": dict(against_the_device(args.frames, args.seed)),
        "honest_texts": texts,
        "rss_growth_mib": (psutil.Process().memory_info().rss - before) / 2**20,
        "cache_bytes_left": service.verifier.cache.num_bytes,
        "moaspec": moaspec.__version__,
    }


def main() -> None:
    """Read the command line, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    torch.set_num_threads(1)
    with patient_link():
        print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
