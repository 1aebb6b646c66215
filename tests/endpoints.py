"""Servers of completions for `moaspec data regenerate --endpoint`: ours, and scripted ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import serving
import tiny
from moaspec.target.target import Target
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.policy.policies import DraftSettings
from moaspec_serve.server_context import ServeSettings
from moaspec_serve.sources.local_source import LocalSource

Fields = dict[str, Any]
Answering = Callable[[Fields], tuple[int, Any]]
"""What a server answers to a request for a completion: status and body."""


@contextmanager
def moaspec_server(of: Target, settings: ServeSettings | None = None) -> Iterator[str]:
    shaping = DraftSettings(Chain(2), free_branches=True)
    source = LocalSource(of, tiny.random_drafter(of), name="tiny", shaping=shaping)
    with serving.serving(source, settings) as served:
        yield served.url


@contextmanager
def fake(answer: Answering, models: Sequence[Fields] = ({"id": "m"},)) -> Iterator[str]:
    """A server that answers every request for a completion by a function."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, {"data": list(models)})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._send(*answer(json.loads(body) | {"key": self.headers["Authorization"]}))

        def _send(self, status: int, body: Any) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    with listening(Handler) as url:
        yield url


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server in a thread of its own."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def completion(text: str, finish: str = "stop", usage: Fields | None = None, **more: Any) -> Any:
    choice = {"index": 0, "text": text, "finish_reason": finish, **more}
    return 200, {"choices": [choice], "usage": usage or {}}
