"""Honest clients beside hostile ones, on `serve`, `target-server` and `edge` as real processes.

Every kind of attack of `attacks.py` and `grpc_attacks.py` runs at once, for $MOASPEC_SOAK_MINUTES
(else some seconds). No text may be wrong, and no server may end. The figures are printed; speed and
memory are judged only in a run of minutes, memory after a first, short attack:

    MOASPEC_SOAK_MINUTES=10 pytest -s tests/soak/test_hostile_clients.py
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx
import psutil
import pytest

import serving
import tiny
from attacks import KEY as HOSTILE
from attacks import MODEL
from moaspec.model.checkpoint.moa_checkpoint import save_drafter
from moaspec.remote.device.bundle import export_bundle, load_device
from moaspec.remote.device.link import LinkOptions
from moaspec.remote.device.remote_session import RemoteOptions, RemoteSession
from moaspec.remote.protocol.grpc_transport import GrpcTransport
from moaspec.remote.server.auth import Credentials
from moaspec.support.ports import bind

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(0),  # it takes as long as it is told to
    pytest.mark.filterwarnings("ignore"),
]

MINUTES = os.environ.get("MOASPEC_SOAK_MINUTES")
MIXED_S = 60 * float(MINUTES or 0.4)
ALONE_S = max(10.0, MIXED_S / 5)
HONEST = 4
"""Clients, each with one text at a time."""

KEYS = ("alice", "bob", HOSTILE)
QUESTIONS = tuple(f"question {i}: {'why? ' * i}" for i in range(8))
TESTS = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "src")]),
    "TOKENIZERS_PARALLELISM": "false",
}
WARM_S = 30.0
"""Of attacks before memory is first looked at: what is loaded or compiled once stays."""

SETTLED_S = 150.0
"""In which memory returns to where it was; caches that nobody uses are given back."""

MAX_GROWTH = 1.25
MAX_SLOWDOWN = 3.0
"""Of honest clients, mixed over alone, at the 99th percentile."""

Once = Callable[[int, int], Awaitable[bool]]
"""One text of a client: whether it was right."""


@dataclass
class Files:
    """A tiny target, a drafter that disagrees with it, a bundle, keys and tokens."""

    directory: Path
    texts: dict[str, str] = field(default_factory=dict)

    def make(self) -> None:
        """Write the files into the directory."""
        target = serving.target()
        target.model.save_pretrained(self.directory / "target")
        assert target.tokenizer is not None
        target.tokenizer.save_pretrained(self.directory / "target")
        save_drafter(tiny.random_drafter(target), self.directory / "drafter")
        export_bundle(
            str(self.directory / "target"), self.directory / "drafter", self.directory / "bundle"
        )
        (self.directory / "keys").write_text("\n".join(KEYS))
        owners = {one: {"sha256": hashlib.sha256(one.encode()).hexdigest()} for one in KEYS}
        (self.directory / "tokens").write_text(json.dumps(owners))
        (self.directory / "token").write_text("bob")
        self.texts = {one: serving.own_text(one) for one in QUESTIONS}

    def at(self, name: str) -> str:
        """A path, for a command line."""
        return str(self.directory / name)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    made = Files(tmp_path_factory.mktemp("soak"))
    made.make()
    return made


class Process:
    """A server's process, whose memory is watched."""

    def __init__(self, *arguments: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "moaspec", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        self.peak = 0

    @property
    def mib(self) -> int:
        """Resident memory of the process."""
        assert self.popen.poll() is None, "the server has ended"
        return psutil.Process(self.popen.pid).memory_info().rss >> 20

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Keep the largest of its memory."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.2) and self.popen.poll() is None:
                self.peak = max(self.peak, self.mib)

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            yield
        finally:
            over.set()
            watching.join()

    def end(self) -> None:
        """Terminate the process, and wait for its end."""
        self.popen.terminate()
        try:
            assert self.popen.wait(60) == 0
        finally:
            self.popen.kill()


def free_port() -> int:
    with bind("127.0.0.1", 0) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def http_server(*arguments: str) -> Iterator[tuple[Process, str]]:
    port = free_port()
    process = Process(*arguments, "--port", str(port), "--name", MODEL, "--threads", "1")
    try:
        for _ in range(600):
            try:
                httpx.get(f"http://127.0.0.1:{port}/health").raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.2)
        yield process, f"127.0.0.1:{port}"
    finally:
        process.end()


def serve(files: Files) -> Any:
    return http_server(
        "serve",
        *("--model", files.at("target"), "--drafter", files.at("drafter")),
        *("--tree", "chain:2", "--dtype", "float32", "--api-key-file", files.at("keys")),
    )


def edge(files: Files, server: str) -> Any:
    return http_server(
        *("edge", "--server", server, "--model", MODEL, "--bundle", files.at("bundle")),
        *("--draft", "chain:2", "--token-file", files.at("token")),
        *("--api-key-file", files.at("keys")),
    )


@contextmanager
def target_server(files: Files) -> Iterator[tuple[Process, str]]:
    process = Process(
        *("target-server", "--model", files.at("target"), "--drafter", files.at("drafter")),
        *("--port", "0", "--threads", "1", "--dtype", "float32", "--tokens", files.at("tokens")),
    )
    try:
        assert process.popen.stdout is not None
        yield process, json.loads(process.popen.stdout.readline())["address"]
    finally:
        process.end()


class OverHttp:
    """Honest clients of an HTTP server."""

    def __init__(self, files: Files, address: str) -> None:
        self._texts, self._address = files.texts, address

    async def once(self, client: int, number: int) -> bool:
        """A streamed chat, tried again while the server is busy."""
        question = QUESTIONS[number % len(QUESTIONS)]
        body = {
            "model": MODEL,
            "messages": serving.say(question),
            "max_tokens": serving.LONGEST,
            "temperature": 0,
            "stream": True,
        }
        async with httpx.AsyncClient(timeout=120) as http:
            while True:
                answer = await http.post(
                    f"http://{self._address}/v1/chat/completions",
                    json=body,
                    headers={"Authorization": f"Bearer {KEYS[client % 2]}"},
                )
                if answer.status_code not in (429, 503):
                    break
                await asyncio.sleep(0.1)
        lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
        chunks = [json.loads(line[6:]) for line in lines]
        said = [one["delta"].get("content") or "" for x in chunks for one in x.get("choices", ())]
        return "".join(said) == self._texts[question]

    async def close(self) -> None:
        """See `OverGrpc`: HTTP keeps no session."""


class OverGrpc:
    """Honest devices of a target server."""

    def __init__(self, files: Files, address: str) -> None:
        self._target, self._texts = serving.target(), files.texts
        device = load_device(files.at("bundle"), dtype="float32")
        link = LinkOptions(dead_after_s=30.0, connect_s=30.0)
        options = RemoteOptions(link=link, draft="chain:2")
        self._sessions = [
            RemoteSession(device, GrpcTransport(address, Credentials(token=KEYS[i % 2])), options)
            for i in range(HONEST)
        ]

    async def once(self, client: int, number: int) -> bool:
        """A text of a session."""
        question = QUESTIONS[number % len(QUESTIONS)]
        tokens: Any = self._target.tokenizer
        prompt = tokens.apply_chat_template(serving.say(question), add_generation_prompt=True)
        result = await self._sessions[client].generate(
            prompt["input_ids"], max_new_tokens=serving.LONGEST
        )
        ids = [token for token in result.token_ids if token != serving.END]
        return bool(tokens.decode(ids, skip_special_tokens=True) == self._texts[question])

    async def close(self) -> None:
        for session in self._sessions:
            await session.close()


async def honest(once: Once, seconds: float) -> tuple[list[float], int]:
    """Seconds of each text of all clients, and how many were wrong."""
    taken: list[float] = []
    wrong = 0

    async def one(client: int) -> None:
        nonlocal wrong
        number = client
        while time.monotonic() < until:
            started = time.monotonic()
            wrong += not await once(client, number)
            taken.append(time.monotonic() - started)
            number += 1

    until = time.monotonic() + seconds
    await asyncio.gather(*(one(i) for i in range(HONEST)))
    return taken, wrong


def attacked(kind: str, address: str, seconds: float) -> dict[str, int]:
    """Attack from a process of lower priority; with the lowest one it starves on a busy machine."""
    attack = [sys.executable, str(TESTS / "attacks.py"), kind, address, str(seconds)]
    told = subprocess.run(
        ["nice", "-n", "5", *attack], stdout=subprocess.PIPE, check=True, env=ENVIRONMENT
    )
    counted: dict[str, int] = json.loads(told.stdout)
    return counted


def percentiles(seconds: list[float]) -> tuple[float, float]:
    """The 50th and the 99th percentile."""
    cuts = quantiles(seconds, n=100, method="inclusive")
    return round(cuts[49], 3), round(cuts[98], 3)


async def soak(process: Process, clients: Any, kind: str, address: str) -> dict[str, Any]:
    """Honest clients alone, then with hostile ones, then alone again."""
    await honest(clients.once, 3)
    if MINUTES:
        await asyncio.to_thread(attacked, kind, address, WARM_S)
        await asyncio.sleep(SETTLED_S)
    before = process.mib
    alone, wrong_alone = await honest(clients.once, ALONE_S)
    attacking = asyncio.create_task(asyncio.to_thread(attacked, kind, address, MIXED_S))
    mixed, wrong_mixed = await honest(clients.once, MIXED_S)
    attacks = await attacking
    await asyncio.sleep(SETTLED_S if MINUTES else 0)
    after = process.mib
    again, wrong_after = await honest(clients.once, ALONE_S / 2)
    await clients.close()
    return {
        "texts": [len(alone), len(mixed), len(again)],
        "wrong": wrong_alone + wrong_mixed + wrong_after,
        "alone_s": percentiles(alone),
        "mixed_s": percentiles(mixed),
        "after_s": percentiles(again),
        "mib": {"before": before, "peak": process.peak, "after": after},
        "load": round(os.getloadavg()[0], 1),
        "attacks": attacks,
    }


@pytest.mark.parametrize("kind", ["serve", "target-server", "edge"])
def test_nobody_is_brought_down_or_starved(kind: str, files: Files) -> None:
    with ExitStack() as servers:
        if kind == "serve":
            process, address = servers.enter_context(serve(files))
        else:
            process, address = servers.enter_context(target_server(files))
        if kind == "edge":
            process, address = servers.enter_context(edge(files, address))
        grpc = kind == "target-server"
        clients: Any = OverGrpc(files, address) if grpc else OverHttp(files, address)
        with process.watched():
            attack = "grpc" if grpc else "http"
            figures = asyncio.run(soak(process, clients, attack, address))
    sys.stdout.write(f"\n{kind}: {json.dumps(figures)}\n")
    assert figures["wrong"] == 0
    if MINUTES:
        assert figures["mib"]["after"] <= figures["mib"]["before"] * MAX_GROWTH
        assert figures["mixed_s"][1] <= MAX_SLOWDOWN * figures["alone_s"][1]
