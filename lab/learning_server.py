"""A real `moaspec target-server --learn`, and devices that are connected while it learns.

The domain is Go structs. A device drafts in PyTorch, one in onnxruntime, and one in Node where
`packages/device-js` is built. They write answers in turn, ask for versions meanwhile, and decode
questions outside the stream at the beginning and after each version; a bias that changes no
token keeps these from the learner. All texts must be equal.

    python lab/learning_server.py SCRATCH_DIRECTORY [CYCLES]

The server's lines follow on standard error. The last line printed is JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moaspec_core.cli.prompts import chat_ids
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_edge.device.bundle import export_bundle, load_device
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.device_onnx.onnx_bundle import export_onnx
from moaspec_edge.device_onnx.onnx_device import OnnxDevice
from moaspec_edge.protocol.fleet import Fleet
from moaspec_edge.protocol.websocket_transport import WebSocketTransport
from moaspec_train.continual import LearnConfig, is_held_out

ALIAS = "smollm2-135m"
DOMAIN = "Write a Go struct {} with fields ID, Name and Date and a constructor."
FIRST = "Active New Old Daily Local Remote Public Private Shared Open Closed Paid Small Large Fast"
SECOND = "User Order Book Song City Player Invoice Employee Ticket Message Product Payment Account"
THIRD = "Event Room Team Device Session Report Image Market Server Contract Supplier Vehicle"
DECODED, NEW_TOKENS, DRAFTED = 8, 32, 4
UNUSED = {1: -1.0}  # the id of <|im_start|>, which no answer has
NODE_DEVICE = Path(__file__).with_name("learning_device.mjs")


def say(**facts: Any) -> None:
    """Print a line of JSON."""
    print(json.dumps(facts), flush=True)


class PythonDevice:
    """A session that stays open, and takes versions between its turns."""

    def __init__(self, name: str, device: Any, address: str) -> None:
        self.name, self.device = name, device
        self.transport = Fleet.of(WebSocketTransport(address))
        options = RemoteOptions(draft=Chain(DRAFTED))
        self.session = RemoteSession(device, self.transport, options)

    async def turn(self, prompt: list[int], bias: dict[int, float]) -> tuple[list[int], list[int]]:
        """A text and the lengths of its rounds; a version that comes is taken at the next turn."""
        options: Any = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "logit_bias": bias}
        made, _ = await asyncio.gather(
            self.session.generate(prompt, **options), self.device.update(self.transport)
        )
        return list(made.token_ids), list(made.accept_lengths)

    async def state(self) -> tuple[str, int]:
        """The version, and how often the link broke."""
        return self.device.version, self.session.stats.cuts

    async def close(self) -> None:
        await self.session.close()


class NodeDevice:
    """The same in a process of Node; see `learning_device.mjs`."""

    name = "Node, int8"

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, bundle: Path, address: str) -> NodeDevice:
        command = ["node", str(NODE_DEVICE), str(bundle), address, str(DRAFTED), str(NEW_TOKENS)]
        pipe = asyncio.subprocess.PIPE
        return cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe))

    async def ask(self, question: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question).encode() + b"\n")
        return json.loads(await self.process.stdout.readline())

    async def turn(self, prompt: list[int], bias: dict[int, float]) -> tuple[list[int], list[int]]:
        found = await self.ask({"prompt": prompt, "bias": list(bias.items())})
        return found["tokenIds"], found["acceptLengths"]

    async def state(self) -> tuple[str, int]:
        found = await self.ask({})
        return found["version"], found["cuts"]

    async def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        await self.process.wait()


@contextlib.contextmanager
def served(learned: Path) -> Iterator[dict[str, Any]]:
    """The facts that a server prints when it listens."""
    options = ["--learn", str(learned), "--port", "0"]
    command = [sys.executable, "-m", "moaspec", "target-server", "--model", ALIAS, *options]
    command += ["--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:  # noqa: S603 - our own
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.terminate()


def stream(prompts: list[list[int]]) -> Iterator[list[int]]:
    """The prompts of one cycle after another, in its numbers of trained and held-out ones."""
    sides: list[Iterator[list[int]]] = [
        itertools.cycle([one for one in prompts if is_held_out(one) == side])
        for side in (False, True)
    ]
    config = LearnConfig()
    while True:
        for _ in range(config.held_out):
            yield from itertools.islice(
                sides[0], config.batch_size * config.steps // config.held_out
            )
            yield next(sides[1])


async def decoded(device: Any, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
    """Texts of questions outside the stream, and tokens per round."""
    turns = [await device.turn(one, UNUSED) for one in prompts]
    lengths = [length for _, found in turns for length in found]
    return [text for text, _ in turns], sum(lengths) / len(lengths)


def cycles(learned: Path) -> list[dict[str, Any]]:
    """The reports of all cycles."""
    log = learned / "log.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


async def measured(devices: list[Any], prompts: list[list[int]], version: str) -> list[Any]:
    """Wait until each device has the version; then its texts and tau."""
    found = []
    for device in devices:
        while version and (await device.state())[0] != version:
            await device.turn(prompts[0], UNUSED)
        texts, tau = await decoded(device, prompts)
        say(device=device.name, state=await device.state(), decoded_tau=tau)
        found.append((texts, tau))
    return found


async def run(scratch: Path, num_cycles: int, facts: dict[str, Any]) -> None:
    """Serve the stream until so many cycles have ended."""
    learned = scratch / "learned"
    bundle = load_device(scratch / "torch", dtype="bfloat16")
    devices: list[Any] = [
        PythonDevice("PyTorch, bf16", bundle, facts["address"]),
        PythonDevice("onnxruntime, int8", OnnxDevice(scratch / "onnx"), facts["address"]),
    ]
    if (NODE_DEVICE.parents[1] / "packages/device-js/dist/index.js").exists():
        devices.append(await NodeDevice.start(scratch / "web", facts["address"]))
    names = [a + b for a in FIRST.split() for b in (SECOND + " " + THIRD).split()]
    prompts = [chat_ids(bundle.target, DOMAIN.format(name)) for name in sorted(names, key=hash_of)]
    before = await measured(devices, prompts[:DECODED], "")
    history, served_texts, tokens, seen = [[tau for _, tau in before]], 0, 0, 0
    begun = 0
    equal = True
    for prompt, device in zip(stream(prompts[DECODED:]), itertools.cycle(devices), strict=False):
        text, _ = await device.turn(prompt, {})
        served_texts, tokens, begun = served_texts + 1, tokens + len(text), begun + 1
        if begun > 64:  # a cycle's worth: the learner has the lowest priority
            waiting = time.monotonic() + 20
            while len(cycles(learned)) == seen and time.monotonic() < waiting:
                await asyncio.sleep(0.5)
        for report in cycles(learned)[seen:]:
            seen, begun = seen + 1, 0
            say(served_texts=served_texts, **report)
            if report["accepted"]:
                after = await measured(devices, prompts[:DECODED], report["fingerprint"])
                history.append([tau for _, tau in after])
                equal &= [texts for texts, _ in after] == [texts for texts, _ in before]
        if seen >= num_cycles:
            break
    say(
        devices=[device.name for device in devices],
        served_texts=served_texts,
        tokens=tokens,
        held_out_tau=[
            (one["tau_before"], one["tau_after"], one["accepted"]) for one in cycles(learned)
        ],
        decoded_tau=history,
        texts_equal=equal and all(texts == before[0][0] for texts, _ in before),
        cuts=[(await device.state())[1] for device in devices],
    )
    for device in devices:
        await device.close()


def hash_of(name: str) -> int:
    """An order that is the same in each run."""
    return sum(place * ord(letter) for place, letter in enumerate(name, 1)) * 7919 % 1009


def main() -> int:
    """Export the bundles, start the server, and run."""
    scratch, num_cycles = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    export_bundle(ALIAS, ALIAS, scratch / "torch")
    export_onnx(ALIAS, ALIAS, scratch / "onnx", weights="int8")
    export_onnx(ALIAS, ALIAS, scratch / "web", weights="int8-web")
    with served(scratch / "learned") as facts:
        say(**facts)
        asyncio.run(run(scratch, num_cycles, facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
