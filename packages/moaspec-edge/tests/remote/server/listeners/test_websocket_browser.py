"""A page in a browser as a client of a target server: tokens, origins, reasons of refusals."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import tiny
from browsing import chromium
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol.identity import PROTOCOL
from moaspec_edge.server.auth import CallAuth
from moaspec_edge.server.listeners.websocket_server import ServerOptions, TargetServer
from moaspec_edge.server.service import TargetService

pytestmark = pytest.mark.browser

DESCRIBE = """([url, token]) => new Promise((resolve) => {
  const socket = new WebSocket(`${url}/v1/describe`, ["moaspec.v1", `moaspec.token.${token}`]);
  socket.binaryType = "arraybuffer";
  let answer = null;
  socket.onopen = () => socket.send(new Uint8Array());
  socket.onmessage = (event) => { answer = [...new Uint8Array(event.data)]; };
  socket.onclose = (event) => resolve([answer, event.code, event.reason]);
})"""


@contextmanager
def pages() -> Iterator[int]:
    """A web server whose pages are all alike; yields its port."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def served(origin: str) -> Iterator[str]:
    """A target server in a thread of its own, for pages of this origin; yields its URL."""
    found: list[str] = []
    ready, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        guard = CallAuth({hashlib.sha256(b"secret").hexdigest(): "alice"})
        where = ServerOptions(port=0, guard=guard, origins=(origin,))
        async with TargetServer(TargetService(tiny.target()), where) as server:
            found.append(server.url)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(60)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def encoded(token: str) -> str:
    return base64.urlsafe_b64encode(token.encode()).decode().rstrip("=")


def test_a_page_is_told_what_it_may_know() -> None:
    with pages() as port, served(f"http://127.0.0.1:{port}") as url, chromium() as browser:
        page = browser.new_page()

        def described(host: str, token: str) -> Any:
            page.goto(f"http://{host}:{port}/")
            return page.evaluate(DESCRIBE, [url, encoded(token)])

        answer, code, _ = described("127.0.0.1", "secret")
        assert pb.Description.FromString(bytes(answer)).protocol == PROTOCOL
        assert code == 1000
        answer, code, reason = described("127.0.0.1", "guess")
        assert (answer, code) == (None, 4401)
        assert "does not know" in reason
        assert described("localhost", "secret") == [None, 1006, ""]
