"""Load balancers as they are configured in deploy/, before real servers that come and go."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import moaspec
import serving
import tiny
from certificates import Authority
from free_port import free_port
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.protocol.fleet import Fleet
from moaspec_edge.server.auth import Credentials, server_tls
from moaspec_edge.server.listeners import websocket_server
from moaspec_edge.server.listeners.websocket_server import ServerOptions, TargetServer
from moaspec_edge.server.service import ServiceOptions, TargetService
from moaspec_edge.server.session_store import StoreOptions
from moaspec_edge.server.shared_verifier import PassOptions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.essential,
    pytest.mark.usefixtures("patient_link"),
]

CONFIG = Path(__file__).parents[2] / "deploy/fleet/haproxy.cfg"
HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
PROMPT = tiny.PROMPTS[1]
NEW = tiny.NEW_TOKENS


@contextmanager
def started(*command: str) -> Iterator[None]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


def configured(directory: Path, authority: Authority, port: int) -> Path:
    """The configuration as it is, with the addresses, names and files of this machine."""
    certificate, key = authority.certificate("localhost")
    (directory / "site.pem").write_bytes(certificate.read_bytes() + key.read_bytes())
    text = CONFIG.read_text()
    for number, host in zip(("1", "2", "3"), HOSTS, strict=True):
        text = text.replace(f"server-{number}.internal", host)
    text = text.replace("targets.internal", "localhost").replace("bind :", "bind 127.0.0.1:")
    text = text.replace("/etc/haproxy/site.pem", str(directory / "site.pem"))
    text = text.replace("/etc/haproxy/ca.pem", str(authority.ca))
    text = text.replace("50051", str(port))
    # The servers share one process, which a busy machine may hold up.
    text = re.sub(r"timeout (connect|check) \d+s", r"timeout \1 60s", text)
    (directory / "haproxy.cfg").write_text(text)
    return directory / "haproxy.cfg"


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed")
@pytest.mark.skipif(sys.platform != "linux", reason="uses several loopback addresses")
def test_haproxy_before_servers_that_drain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket_server, "SWEEP_S", 0.1)
    authority = Authority(tmp_path, "ours")
    files: Any = authority.certificate("localhost")
    port = free_port(("127.0.0.1", *HOSTS))
    config = configured(tmp_path, authority, port)

    def server(host: str) -> TargetServer:
        options = ServerOptions(host=host, port=port, tls=server_tls(*files))
        # A farewell may be lost where a connection is reset. A device leaves a server that drains
        # within 50 ms; its text must not end before that.
        sessions, passes = StoreOptions(idle_s=0.0), PassOptions(min_pass_s=0.02)
        limits = ServiceOptions(sessions=sessions, passes=passes)
        return TargetServer(TargetService(tiny.target(), None, limits), options)

    def session() -> RemoteSession:
        fleet = Fleet.at([f"wss://localhost:{port}"], Credentials(ca=authority.ca))
        device = LocalDevice(tiny.target(), moaspec.NgramProposer())
        return RemoteSession(device, fleet, RemoteOptions(draft=Chain(2)))

    async def run() -> None:
        async with AsyncExitStack() as stack:
            servers = [await stack.enter_async_context(server(host)) for host in HOSTS]
            stack.enter_context(started("haproxy", "-db", "-f", str(config)))
            # Texts with one beginning meet; other texts do not all go there.
            used = []
            for prompt in (PROMPT, PROMPT, *([number, 1, 2] for number in range(8))):
                one = session()
                await one.generate(prompt, max_new_tokens=2)
                used.append([bool(len(at.service.sessions)) for at in servers].index(True))
                await one.close()
                while any(len(at.service.sessions) for at in servers):
                    await asyncio.sleep(0.01)
            assert used[0] == used[1]
            assert len(set(used)) > 1
            # A server that ends in the middle of a text.
            one, text, left = session(), list[int](), list(servers)
            async for event in one.stream(PROMPT, max_new_tokens=NEW):
                text[event.start :] = event.token_ids
                if len(text) >= 4 and len(left) == len(servers):
                    left = [at for at in servers if not len(at.service.sessions)]
                    (busy,) = set(servers) - set(left)
                    await busy.drain(60.0)
            assert text == list(tiny.own_texts("llama")[1])
            assert one.stats.reopened >= 1
            await one.close()

    asyncio.run(run())


@pytest.mark.skipif(
    find_spec("vllm_router") is None, reason="vllm-router is not installed (pip install)"
)
def test_vllm_router_before_openai_servers() -> None:
    port, metrics = free_port(), free_port()
    with ExitStack() as stack:
        workers = [stack.enter_context(serving.serving(serving.source())) for _ in range(2)]
        command = [sys.executable, "-m", "vllm_router.launch_router", "--port", str(port)]
        command += ["--prometheus-port", str(metrics), "--policy", "cache_aware"]
        command += ["--worker-urls", *(one.url for one in workers)]
        stack.enter_context(started(*command))
        router = serving.Served(f"http://127.0.0.1:{port}", workers[0].source)
        http = stack.enter_context(router.http())
        while True:
            try:
                if http.get("/health").status_code == 200:
                    break
            except Exception:  # noqa: BLE001 - it does not listen yet
                time.sleep(0.1)
        client: Any = router.openai()
        for question in ("why?", "how?", "who?"):
            told = client.chat.completions.create(
                model=serving.MODEL,
                messages=serving.say(question),
                max_tokens=serving.LONGEST,
                temperature=0,
                stream=True,
            )
            text = "".join(chunk.choices[0].delta.content or "" for chunk in told if chunk.choices)
            assert text == serving.own_text(question)
        client.close()
