"""A page that drafts in the browser, with a server that can be killed."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from google.protobuf.message import DecodeError

import memorised_target
from free_port import free_port
from memorised_target import QUESTION
from moaspec.model.checkpoint.moa_checkpoint import fingerprint, save_drafter
from moaspec.target.target import Target
from moaspec_core.drafting.protocols import VerifyRequest, VerifyResult
from moaspec_edge.http.device_page import DevicePage, find_scripts, page_protocols
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol.websocket_transport import WebSocketConnection
from moaspec_edge.server.listeners.websocket_server import ServerOptions, TargetServer
from moaspec_edge.server.service import TargetService
from moaspec_edge.server.shared_verifier import SharedVerifier

PAUSE_S = 0.02
"""Before each message of a server, so that an answer lasts long enough to be cut."""

TOLD_PASS_S = 1.0
"""What a server tells of its passes, so that drafts pay on every machine."""

READY = "document.querySelector('#model')?.textContent === 'tiny'"
"""The page has its bundle."""

KEPT = "navigator.serviceWorker.controller !== null"
"""It would open without a server."""

BEGIN_ANSWER = """async (body) => {
  const { Server } = await import('/server.js');
  const server = window.device ??= new Server();
  await server.about();
  const told = window.told = { ids: [], most: 0, shownMs: 0, done: false };
  (async () => {
    for await (const { moaspec } of server.chat(body, new AbortController().signal)) {
      told.ids.push(...(moaspec.pieces ?? []).map((piece) => piece.id));
      const shown = moaspec.provisional?.length ?? 0;
      told.most = Math.max(told.most, shown);
      if (shown && told.cutMs) told.shownMs ||= Date.now();
    }
    told.done = true;
  })();
}"""
"""An answer in the background: its ids, most provisional tokens at once, and when they came."""

LINK_DOWN = "device.link.state === 'down'"
"""Of such an answer: the link is down."""

PACKAGE = Path(__file__).parents[1] / "packages" / "device-js"


def built_scripts() -> Path:
    """The page's scripts; skips without them."""
    if shutil.which("node") is None or not (PACKAGE / "dist" / "page" / "worker.js").exists():
        pytest.skip("needs Node and `make device-page`")
    return find_scripts(PACKAGE / "dist" / "page")


def save_models(directory: Path) -> None:
    """A target that knows one answer, its drafter, and their ONNX bundle."""
    pytest.importorskip("onnx", reason="moaspec-edge[export] is not installed")
    from moaspec_edge.device_onnx.onnx_bundle import export_onnx

    target: Any = memorised_target.target()
    target.model.save_pretrained(directory / "target")
    target.tokenizer.save_pretrained(directory / "target")
    save_drafter(memorised_target.drafter(), directory / "drafter")
    places = directory / "target", directory / "drafter", directory / "bundle"
    export_onnx(*places, weights="float32")


@dataclass
class PageServer:
    """A server in a thread of its own, which listens on the same port whenever it runs.

    Attributes:
        most: tokens of a text, prompt included; verdicts on later ones are lost.
    """

    directory: Path
    scripts: Path
    port: int
    target: Target
    tls: ssl.SSLContext | None = None
    stop: Any = None
    adopt: Any = None  # takes a version of the drafter
    thread: threading.Thread | None = None
    most: int | None = None

    @property
    def url(self) -> str:
        """Address of the page."""
        host = "http://127.0.0.1" if self.tls is None else "https://localhost"
        return f"{host}:{self.port}/"

    def start(self) -> None:
        """Listen; returns when it does."""
        ready = threading.Event()
        self.thread = threading.Thread(target=asyncio.run, args=(self._serve(ready),))
        self.thread.start()
        assert ready.wait(60)

    async def _serve(self, ready: threading.Event) -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        self.stop = lambda: loop.call_soon_threadsafe(stop.set)
        page = DevicePage(self.directory / "bundle", self.scripts, model="tiny", learns=True)
        where = ServerOptions(port=self.port, tls=self.tls, http=page_protocols(page))
        service = TargetService(self.target, memorised_target.drafter())
        self.adopt = lambda drafter: loop.call_soon_threadsafe(
            service.adopt, drafter, fingerprint(drafter)
        )
        async with TargetServer(service, where):
            ready.set()
            await stop.wait()

    @contextmanager
    def holding(self, tokens: int, question: str = QUESTION) -> Iterator[None]:
        """Send about so many tokens of an answer, so that no cut comes too late."""
        self.most = len(memorised_target.prompt_ids(self.target, question)) + tokens
        try:
            yield
        finally:
            self.most = None

    def kill(self) -> None:
        """End all connections, and forget all sessions."""
        if self.thread is not None:
            self.stop()
            self.thread.join(60)
            self.thread = None


def _base(frame: bytes) -> int:
    """Tokens of the text before a verdict; 0 of other messages."""
    try:
        return pb.ServerMessage.FromString(frame).verdict.base
    except DecodeError:  # an answer to another call
        return 0


@contextmanager
def serving_pages(
    directory: Path, scripts: Path, tls: ssl.SSLContext | None = None
) -> Iterator[PageServer]:
    """A server of the models in a directory, see `save_models`."""
    send = WebSocketConnection.send

    async def send_late(connection: WebSocketConnection, frame: bytes) -> None:
        await asyncio.sleep(PAUSE_S)
        most = server.most
        if most is None or _base(frame) <= most:
            await send(connection, frame)

    decide = SharedVerifier.decide

    async def decide_and_tell(
        shared: SharedVerifier, request: VerifyRequest
    ) -> tuple[VerifyResult, float]:
        verdict, _ = await decide(shared, request)
        return verdict, TOLD_PASS_S

    server = PageServer(directory, scripts, free_port(), memorised_target.target(), tls)
    with (
        patch.object(WebSocketConnection, "send", send_late),
        patch.object(SharedVerifier, "decide", decide_and_tell),
    ):
        server.start()
        try:
            yield server
        finally:
            server.kill()
