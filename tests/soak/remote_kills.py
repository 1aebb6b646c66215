"""Servers and devices that are killed (SIGKILL) at random moments, again and again.

First the server dies under a device that decodes text after text, and another one is started on
the same port each time; then devices die under one server. Every text must be that of plain
decoding, no device may hang, and afterwards the server must hold nothing: no session, no keys and
values, and no more memory than after the first few kills. Each device keeps prompts on a disk that
is full (a limit on the size of files that the kernel enforces). The last line is JSON.

    python tests/soak/remote_kills.py --kills 50

One program that imports everything once and forks, so that a process costs no more than its work.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.support import limits
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.protocol.websocket_transport import WebSocketTransport
from moaspec_edge.server.listeners import websocket_server
from moaspec_edge.server.listeners.websocket_server import ServerOptions, TargetServer
from moaspec_edge.server.service import ServiceOptions, TargetService
from moaspec_edge.server.session_store import StoreOptions

sys.path.insert(0, str(Path(__file__).parents[1]))
import tiny

PROMPT = tuple(i % tiny.VOCAB for i in range(130))
"""Two blocks of the prefix cache and a little."""
NEW = 24
SETTLE_S = 120.0
"""A busy machine may take its time; an idle one needs a few seconds."""


def forked(work: Callable[[], None]) -> int:
    """A child that does this; returns its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException as error:  # noqa: BLE001 - a child says why it ends, and always ends
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def serve(port: int, state: Path) -> None:
    """A server that writes down every fifth of a second what it holds."""

    async def run() -> None:
        sessions = StoreOptions(idle_s=1.0)
        limits.MAX_SILENCE_S, websocket_server.SWEEP_S = 2, 0.2  # of this process
        options = ServiceOptions(sessions=sessions)
        service = TargetService(tiny.target(), tiny.agreeing_drafter("llama"), options)
        async with TargetServer(service, ServerOptions(port=port)):
            while True:
                data = {
                    "sessions": len(service.sessions),
                    "cache_bytes": service.verifier.cache.num_bytes,
                    "rows": service.shared.num_rows,
                }
                scratch = state.with_suffix(".new")
                scratch.write_text(json.dumps(data))
                scratch.replace(state)
                await asyncio.sleep(0.2)

    asyncio.run(run())


def decode(port: int, directory: Path, texts: int, expected: list[int], tell: int) -> None:
    """A device that decodes so many texts, each in a session of its own; a byte for each."""
    # The disk is full: the cache's files cannot be written, which costs nothing but the cache.
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))

    async def run() -> None:
        device = LocalDevice(tiny.target(), tiny.agreeing_drafter("llama"))
        transport = WebSocketTransport(f"ws://127.0.0.1:{port}")
        options = RemoteOptions(draft=Chain(2), prefix_dir=directory)
        for _ in range(texts):
            session = RemoteSession(device, transport, options)
            result = await session.generate(PROMPT, max_new_tokens=NEW)
            if result.token_ids != expected:
                raise AssertionError("the text is not that of plain decoding")
            await session.close()
            os.write(tell, b".")

    asyncio.run(run())


def kill(child: int) -> None:
    """As the kernel does when memory is short; what ended before has failed."""
    if os.waitpid(child, os.WNOHANG)[0]:
        raise SystemExit("a process ended by itself")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def until(what: str, done: Callable[[], bool]) -> float:
    """Wait; returns for how long."""
    started = time.monotonic()
    while not done():
        if time.monotonic() - started > SETTLE_S:
            raise SystemExit(f"hung: {what}")
        time.sleep(0.05)
    return time.monotonic() - started


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Bench:
    """The kills.

    Args:
        kills: of each side.
        longest_s: between two.
        directory: scratch.
    """

    def __init__(self, kills: int, longest_s: float, directory: Path) -> None:
        self._kills, self._longest_s, self._directory = kills, longest_s, directory
        self._chance = random.Random(0)
        self._port, self._state = free_port(), directory / "state"
        self._told, self._tell = os.pipe()
        os.set_blocking(self._told, False)
        self._texts = 0
        self._expected = tiny.own_text(tiny.target(), PROMPT, NEW)
        tiny.agreeing_drafter("llama")  # taught once, before anybody forks

    def _server(self) -> int:
        self._state.unlink(missing_ok=True)
        return forked(lambda: serve(self._port, self._state))

    def _device(self, texts: int) -> int:
        where = (self._port, self._directory / "prefixes", texts, self._expected, self._tell)
        return forked(lambda: decode(*where))

    def _finished(self) -> int:
        """Texts that devices have finished so far."""
        with contextlib.suppress(BlockingIOError):
            self._texts += len(os.read(self._told, 1 << 16))
        return self._texts

    def _pause(self) -> None:
        time.sleep(self._chance.uniform(0.0, self._longest_s))

    def servers(self) -> dict[str, Any]:
        """Kill servers under a device that never ends by itself."""
        server, device = self._server(), self._device(10**9)
        until("the first text", lambda: self._finished() > 0)
        for _ in range(self._kills):
            self._pause()
            kill(server)
            self._pause()
            server = self._server()
        done = self._finished()
        after_s = until("texts after the last kill", lambda: self._finished() >= done + 3)
        kill(device)
        kill(server)
        return {"texts": self._finished(), "three_more_after_s": after_s}

    def devices(self) -> dict[str, Any]:
        """Kill devices under one server."""
        before, server = self._finished(), self._server()
        memory = []
        for number in range(self._kills):
            device = self._device(10**9)
            self._pause()
            self._pause()
            kill(device)
            if number >= self._kills // 5:
                memory.append(psutil.Process(server).memory_info().rss)
        last = self._device(3)
        assert os.waitpid(last, 0)[1] == 0, "the last device failed"
        empty_s = until("the server holds nothing", self._empty)
        rss = psutil.Process(server).memory_info().rss
        kill(server)
        return {
            "texts": self._finished() - before,
            "empty_after_s": empty_s,
            "rss_growth_mib": (rss - memory[0]) / 2**20,
        }

    def _empty(self) -> bool:
        return self._state.exists() and not any(json.loads(self._state.read_text()).values())


def main() -> None:
    """Read the command line, kill, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--longest-s", type=float, default=1.0, help="between two kills")
    args = parser.parse_args()
    # A forked child must not inherit a pool of threads that it cannot use.
    torch.set_num_threads(1)
    directory = Path(tempfile.mkdtemp())
    try:
        bench = Bench(args.kills, args.longest_s, directory)
        data = {"servers": bench.servers(), "devices": bench.devices()}
    finally:
        shutil.rmtree(directory)
    print(json.dumps({"kills_of_each": args.kills, **data}))


if __name__ == "__main__":
    main()
