"""Real servers for tests of devices in other processes and threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moaspec.backends.load import load_target
from moaspec.generation.drafters import load_drafter
from moaspec_edge.server.listeners.websocket_server import ServerOptions, TargetServer
from moaspec_edge.server.service import TargetService


@contextmanager
def server_in_thread(directory: Path) -> Iterator[str]:
    """A server of `target` and `drafter` below a directory; yields its URL."""
    urls: list[str] = []
    ready, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        target = load_target(directory / "target")
        drafter = load_drafter(directory / "drafter", target=target)
        async with TargetServer(TargetService(target, drafter), ServerOptions(port=0)) as server:
            urls.append(server.url)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(60)
    yield urls[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(60)
    loop.close()
