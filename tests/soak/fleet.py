"""64 scripted devices on three servers, of which one is killed, one is drained and one is added.

Each device writes conversations of two turns, greedy and sampled, with drafts that are right seven
times of ten, and checks every text against plain decoding. All know four addresses; the fourth
server starts late. No text may be wrong or lost, and the drained server must end with 0. The last
line is JSON: seconds of rounds and texts by phase, the passes of each server, and memory of each
process in MiB when the first phase begins, ends, and at the end. In runs of five minutes and more
memory must be flat. `--seconds` is that of four phases, without the time in which servers start.

    python tests/soak/fleet.py --seconds 600
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from pathlib import Path
from statistics import quantiles
from typing import Any

import psutil

import moaspec
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.protocol.fleet import AVOID_S, Fleet

sys.path.insert(0, str(Path(__file__).parents[1]))
import tiny
from links import patient_link

PHASES = ("three servers", "one killed", "one drained", "one added")
NEW = 24
RETRY_S = 10.0
"""One process plays all devices, so an answer that comes late is not lost."""
MAX_GROWTH = 1.25
FLAT_S = 300.0
"""Shorter runs end before caches are full."""

Turn = tuple[list[int], list[int]]
"""A prompt and the text that follows."""


class Server:
    """A process of `moaspec target-server`."""

    def __init__(self, model: Path, address: str, metrics: int) -> None:
        self.address, self.metrics, self._warm = address, metrics, 0
        command = [sys.executable, "-m", "moaspec", "target-server", "--model", str(model)]
        command += ["--dtype", "float32", "--threads", "1", "--max-sessions", "64"]
        command += ["--port", address.rpartition(":")[2], "--metrics-port", str(metrics)]
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )

    async def serving(self) -> None:
        """Wait until it has warmed up."""
        assert self.process.stdout is not None
        line = await asyncio.to_thread(self.process.stdout.readline)
        assert json.loads(line)["address"] == f"ws://{self.address}"
        self._warm = await self._all_passes()

    async def passes(self) -> int:
        """Number of passes for devices."""
        return await self._all_passes() - self._warm

    async def _all_passes(self) -> int:
        told = await asyncio.to_thread(
            lambda: urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics").read()
        )
        lines = told.decode().splitlines()
        return int(
            float(next(one for one in lines if one.startswith("moaspec_passes ")).split()[1])
        )

    @property
    def mib(self) -> int:
        """Resident memory."""
        return int(psutil.Process(self.process.pid).memory_info().rss >> 20)


class Devices:
    """The devices, and what became of their texts."""

    def __init__(self, target: moaspec.Target, addresses: list[str], number: int) -> None:
        self._target, self._fleet = target, Fleet.at(addresses)
        self.number, self.phase, self.ending = number, PHASES[0], False
        self.texts: Counter[str] = Counter()
        self.rounds_s: dict[str, list[float]] = defaultdict(list)
        self.texts_s: dict[str, list[float]] = defaultdict(list)
        self._chats = [self._chat(n) for n in range(32)]

    def _chat(self, number: int) -> tuple[list[Turn], dict[str, Any]]:
        """Two turns of plain decoding, and how they are sampled."""
        sampled: dict[str, Any] = {"temperature": 0.8, "seed": number} if number % 2 else {}
        options = {"max_new_tokens": NEW, "stop_token_ids": (), **sampled}
        turns, prompt = [], [(number * 7 + i * 3) % tiny.VOCAB for i in range(8 + number)]
        for question in ([], [1, number, 2]):
            prompt = [*prompt, *question]
            text = moaspec.generate(self._target, prompt, **options).token_ids
            turns.append((prompt, text))
            prompt = [*prompt, *text]
        return turns, options

    async def run(self) -> None:
        """Let all devices write until `ending` is set; each finishes its conversation."""
        await asyncio.gather(*(self._device(number) for number in range(self.number)))

    async def _device(self, device: int) -> None:
        number = device
        while not self.ending:
            turns, options = self._chats[number % len(self._chats)]
            known = [[*prompt, *text] for prompt, text in turns]
            drafter = moaspec.OracleProposer(known[1:], agreement=0.7, seed=device)
            session = RemoteSession(
                LocalDevice(self._target, drafter),
                self._fleet,
                RemoteOptions(draft=Chain(4), draft_ahead=False, on_cut="wait", retry_s=RETRY_S),
            )
            for prompt, text in turns:
                await self._turn(session, prompt, text, options)
            self.texts["reopened"] += session.stats.reopened
            await session.close()
            number += 1

    async def _turn(
        self, session: RemoteSession, prompt: list[int], text: list[int], options: dict[str, Any]
    ) -> None:
        self.texts["begun"] += 1
        started, first = time.monotonic(), len(session.stats.rounds)
        result = await session.generate(prompt, **options)
        self.texts["ended"] += 1
        self.texts["wrong"] += result.token_ids != text
        self.texts_s[self.phase].append(time.monotonic() - started)
        for one in list(session.stats.rounds)[first:]:
            self.rounds_s[self.phase].append(one.received_s - one.sent_s)


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Of some times."""
    if len(seconds) < 2:
        return {}
    cuts = quantiles(seconds, n=100, method="inclusive")
    return {"p50": round(cuts[49], 3), "p99": round(cuts[98], 3), "max": round(max(seconds), 3)}


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on."""
    probes = [socket.socket() for _ in range(number)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


async def soak(seconds: float, number: int, model: Path) -> dict[str, Any]:
    """The run; returns what the last line says."""
    target = moaspec.load_target(str(model), dtype="float32")
    ports = free_ports(8)
    addresses = [f"127.0.0.1:{port}" for port in ports[:4]]
    devices = Devices(target, addresses, number)
    servers = [Server(model, *where) for where in zip(addresses[:3], ports[4:7], strict=True)]
    try:
        await asyncio.gather(*(one.serving() for one in servers))
        mib = {"start": memory(servers)}
        running = asyncio.create_task(devices.run())
        await asyncio.sleep(seconds / 4)
        mib["warm"] = memory(servers)
        used = [await one.passes() for one in servers]
        killed, drained = servers.pop(0), servers.pop(0)

        devices.phase = PHASES[1]
        killed.process.send_signal(signal.SIGKILL)
        await asyncio.sleep(seconds / 4)

        devices.phase = PHASES[2]
        drained.process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(drained.process.wait)
        await asyncio.sleep(seconds / 4)

        servers.append(Server(model, addresses[3], ports[7]))
        await servers[-1].serving()
        devices.phase = PHASES[3]
        await asyncio.sleep(max(2 * AVOID_S, seconds / 4))
        devices.ending = True
        await running
        mib["end"] = memory(servers)
        used += [await one.passes() for one in servers]
        return {
            "devices": number,
            "seconds": seconds,
            "texts": dict(devices.texts),
            "rounds_s": {phase: percentiles(s) for phase, s in devices.rounds_s.items()},
            "texts_s": {phase: percentiles(s) for phase, s in devices.texts_s.items()},
            "passes": used,
            "drained_exit": code,
            "mib": mib,
            "load": round(os.getloadavg()[0], 1),
        }
    finally:
        for one in servers:
            one.process.kill()


def memory(servers: list[Server]) -> dict[str, int]:
    """MiB of each server by its port, and of the devices."""
    own = int(psutil.Process().memory_info().rss >> 20)
    return {one.address.rpartition(":")[2]: one.mib for one in servers} | {"devices": own}


def main() -> None:
    """Run, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--devices", type=int, default=64)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        made = tiny.fresh_target(tokenizer=tiny.tokenizer())
        made.model.save_pretrained(scratch)
        made.tokenizer.save_pretrained(scratch)  # type: ignore[union-attr]
        with patient_link():
            found = asyncio.run(soak(asked.seconds, asked.devices, Path(scratch)))
    print(json.dumps(found))
    texts, mib = found["texts"], found["mib"]
    assert texts["begun"] == texts["ended"] > asked.devices, "a text was lost"
    assert not texts["wrong"], "a text was wrong"
    assert found["drained_exit"] == 0
    assert min(found["passes"]) > 0, "a server was not used"
    if asked.seconds >= FLAT_S:
        for name in mib["warm"].keys() & mib["end"].keys():
            assert mib["end"][name] <= MAX_GROWTH * mib["warm"][name], f"{name} grew"


if __name__ == "__main__":
    main()
