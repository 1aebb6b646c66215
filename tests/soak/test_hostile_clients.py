"""Honest clients beside hostile ones, on `serve`, `target-server` and `edge` as real processes.

Every kind of attack of `attacks.py` and `websocket_attacks.py` runs at once, for
$MOASPEC_SOAK_MINUTES (else some seconds). `edge` is attacked over HTTP while its server is attacked
over WebSockets with TLS; a second `edge` has a server that lies. No text may be wrong, and no
process may end. The figures are printed; speed and memory are judged only in a run of minutes,
memory after honest long texts and a first, short attack:

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
from certificates import Authority
from free_port import free_port
from moaspec.model.checkpoint.moa_checkpoint import save_drafter
from moaspec_edge.device.bundle import export_bundle, load_device
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.protocol.websocket_transport import WebSocketTransport
from moaspec_edge.server.auth import Credentials

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(0),  # it takes as long as it is told to
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("patient_link"),
]

MINUTES = os.environ.get("MOASPEC_SOAK_MINUTES")
MIXED_S = 60 * float(MINUTES or 0.15)
ALONE_S = max(3.0, MIXED_S / 5)
HONEST = 4
"""Clients, each with one text at a time."""

KEYS = ("alice", "bob", HOSTILE)
QUESTIONS = (*(f"question {i}: {'why? ' * i}" for i in range(8)), "a long one: " + "why? " * 300)
CA, CERTIFICATE, PRIVATE_KEY = "ours.pem", "ours-server.crt", "ours-server.key"
TESTS = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(TESTS),
    "TOKENIZERS_PARALLELISM": "false",
}
WARM_S = 30.0
"""Of attacks before memory is looked at: what is loaded or compiled once stays, and the caches of
kernels, grammars and stored responses are filled up to their limits."""

SETTLED_S = 150.0
"""In which memory returns to where it was; caches that nobody uses are given back."""

MAX_GROWTH = 1.25
MAX_SLOWDOWN = 3.0
"""Of honest clients, mixed over alone, at the 99th percentile."""

MAX_BEAT_S = 2.0
"""Seconds of a request that needs no model beside attackers, at the 99th percentile."""

BEAT_S = 0.2
"""Between two of these."""

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
        authority = Authority(self.directory, "ours")
        authority.certificate("server")
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


Processes = dict[str, Process]


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


def edge(files: Files, server: str, *options: str) -> Any:
    return http_server(
        *("edge", "--server", server, "--model", MODEL, "--bundle", files.at("bundle")),
        *("--tree", "chain:2", "--token-file", files.at("token")),
        *("--api-key-file", files.at("keys"), *options),
    )


@contextmanager
def target_server(files: Files, *, tls: bool = False) -> Iterator[tuple[Process, str]]:
    secure = ("--certificate", files.at(CERTIFICATE), "--key", files.at(PRIVATE_KEY))
    process = Process(
        *("target-server", "--model", files.at("target"), "--drafter", files.at("drafter")),
        *("--port", "0", "--threads", "1", "--dtype", "float32", "--tokens", files.at("tokens")),
        *(secure if tls else ()),
    )
    try:
        assert process.popen.stdout is not None
        yield process, json.loads(process.popen.stdout.readline())["address"]
    finally:
        process.end()


@contextmanager
def lying_server(files: Files) -> Iterator[str]:
    program = [sys.executable, str(TESTS / "lying_server.py")]
    liar = subprocess.Popen(
        [*program, files.at("target"), files.at("drafter")],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    try:
        assert liar.stdout is not None
        yield liar.stdout.readline().strip()
    finally:
        liar.kill()
        liar.wait()


def host_of(url: str) -> str:
    """HOST:PORT."""
    return url.partition("://")[2]


class OverHttp:
    """Honest clients of an HTTP server."""

    busy: tuple[int, ...] = (429, 503)

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
                if answer.status_code not in self.busy:
                    break
                await asyncio.sleep(0.1)
        lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
        chunks = [json.loads(line[6:]) for line in lines]
        said = [one["delta"].get("content") or "" for x in chunks for one in x.get("choices", ())]
        return "".join(said) == self._texts[question]

    async def beat(self) -> None:
        """A request that needs no model."""
        async with httpx.AsyncClient(timeout=120) as http:
            (await http.get(f"http://{self._address}/health")).raise_for_status()

    async def close(self) -> None:
        """See `OverWebSockets`: HTTP keeps no session."""


class LiedTo(OverHttp):
    """Clients of an edge whose server lies: each is answered, with a text or an error."""

    busy = ()

    async def once(self, client: int, number: int) -> bool:
        """Any text may come, since the server decides what the target chose."""
        await super().once(client, number)
        return True


class OverWebSockets:
    """Honest devices of a target server."""

    busy = OverHttp.busy

    def __init__(self, files: Files, address: str) -> None:
        self._target, self._texts = serving.target(), files.texts
        device = load_device(files.at("bundle"), dtype="float32")
        options = RemoteOptions(draft="chain:2")
        transports = [WebSocketTransport(address, Credentials(token=one)) for one in KEYS[:2]]
        self._beating = transports[0]
        self._sessions = [RemoteSession(device, transports[i % 2], options) for i in range(HONEST)]

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

    async def beat(self) -> None:
        """A request that needs no model."""
        await self._beating.describe()

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


async def beats(once: Callable[[], Awaitable[None]], until: asyncio.Task[Any]) -> list[float]:
    """Seconds of each request that needs no model, until a task ends."""
    taken: list[float] = []
    while not until.done():
        started = time.monotonic()
        await once()
        taken.append(time.monotonic() - started)
        await asyncio.sleep(BEAT_S)
    return taken


Attackers = tuple[tuple[str, ...], ...]
"""Of each program that attacks: "http" or "websocket", HOST:PORT, and a CA where there is TLS."""


async def attacked(attackers: Attackers, seconds: float) -> dict[str, int]:
    """Attack from processes of lower priority; with the lowest one they would starve."""
    counted = [asyncio.to_thread(_attack, *one, seconds=seconds) for one in attackers]
    return {name: n for found in await asyncio.gather(*counted) for name, n in found.items()}


def _attack(kind: str, address: str, *ca: str, seconds: float) -> dict[str, int]:
    attack = [sys.executable, str(TESTS / "attacks.py"), kind, address, str(seconds), *ca]
    told = subprocess.run(
        ["nice", "-n", "5", *attack], stdout=subprocess.PIPE, check=True, env=ENVIRONMENT
    )
    return {f"{kind}, {name}": number for name, number in json.loads(told.stdout).items()}


def percentiles(seconds: list[float]) -> tuple[float, float]:
    """The 50th and the 99th percentile."""
    cuts = quantiles(seconds, n=100, method="inclusive")
    return round(cuts[49], 3), round(cuts[98], 3)


async def soak(processes: Processes, clients: Any, attackers: Attackers) -> dict[str, Any]:
    """Honest clients alone, then with hostile ones, then alone again."""
    mib = {"start": _mib(processes)}
    await honest(clients.once, 3)
    mib["honest"] = _mib(processes)
    if MINUTES:
        await attacked(attackers, WARM_S)
        await asyncio.sleep(SETTLED_S)
    mib["before"] = _mib(processes)
    alone, wrong_alone = await honest(clients.once, ALONE_S)
    attacking = asyncio.create_task(attacked(attackers, MIXED_S))
    (mixed, wrong_mixed), beaten, attacks = await asyncio.gather(
        honest(clients.once, MIXED_S), beats(clients.beat, attacking), attacking
    )
    await asyncio.sleep(SETTLED_S if MINUTES else 0)
    mib["after"] = _mib(processes)
    again, wrong_after = await honest(clients.once, ALONE_S / 2)
    await clients.close()
    return {
        "texts": [len(alone), len(mixed), len(again)],
        "wrong": wrong_alone + wrong_mixed + wrong_after,
        "alone_s": percentiles(alone),
        "mixed_s": percentiles(mixed),
        "after_s": percentiles(again),
        "beat_s": (*percentiles(beaten), round(max(beaten), 3)),
        "mib": mib | {"peak": {name: one.peak for name, one in processes.items()}},
        "load": round(os.getloadavg()[0], 1),
        "attacks": attacks,
    }


def _mib(processes: Processes) -> dict[str, int]:
    return {name: one.mib for name, one in processes.items()}


KINDS = ("serve", "target-server", "edge", "edge with a lying server")


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_is_brought_down_or_starved(kind: str, files: Files) -> None:
    with ExitStack() as stack:
        start = stack.enter_context
        clients: Any
        attackers: Attackers
        if kind == "serve":
            process, address = start(serve(files))
            processes = {kind: process}
            clients, attackers = OverHttp(files, address), (("http", address),)
        elif kind == "target-server":
            process, address = start(target_server(files))
            processes = {kind: process}
            clients, attackers = OverWebSockets(files, address), (("websocket", host_of(address)),)
        elif kind == "edge":
            server, behind = start(target_server(files, tls=True))
            behind = behind.replace("127.0.0.1", "localhost")  # as its certificate says
            process, address = start(edge(files, behind, "--ca", files.at(CA)))
            processes = {kind: process, "its server": server}
            clients = OverHttp(files, address)
            attackers = (("http", address), ("websocket", host_of(behind), files.at(CA)))
        else:
            process, address = start(edge(files, start(lying_server(files)), "--give-up-s", "5"))
            processes = {kind: process}
            clients, attackers = LiedTo(files, address), (("http", address),)
        for one in processes.values():
            start(one.watched())
        figures = asyncio.run(soak(processes, clients, attackers))
    sys.stdout.write(f"\n{kind}: {json.dumps(figures)}\n")
    assert figures["wrong"] == 0
    if MINUTES:
        for name, after in figures["mib"]["after"].items():
            assert after <= figures["mib"]["before"][name] * MAX_GROWTH
        if clients.busy:  # a liar's device takes as long as the lie says
            assert figures["mixed_s"][1] <= MAX_SLOWDOWN * figures["alone_s"][1]
        assert figures["beat_s"][1] <= MAX_BEAT_S
