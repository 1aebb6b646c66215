"""The files of the page that drafts in the browser: headers, paths, and who may connect."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

import device_pages
from device_pages import PageServer
from moaspec_core.errors import CheckpointError, InputError
from moaspec_edge.cli.target_server import _page, _scripts
from moaspec_edge.http.device_page import DevicePage, find_scripts, page_protocols

WASM = b"\0asm" + bytes(100)


def fake_scripts(directory: Path) -> Path:
    """Files with the names of the built ones."""
    for name in ("server.js", "worker.js", "sw.js", "ort-wasm-simd-threaded.mjs"):
        (directory / name).write_text(f"// {name}\n")
    (directory / "ort-wasm-simd-threaded.wasm.gz").write_bytes(gzip.compress(WASM))
    return directory


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_scripts(tmp_path_factory.mktemp("scripts"))


@pytest.fixture(scope="module")
def server(device_models: Path, scripts: Path) -> Iterator[PageServer]:
    with device_pages.serving_pages(device_models, scripts) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: PageServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as found:
        yield found


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/app.js", "text/javascript; charset=utf-8"),
        ("/worker.js", "text/javascript; charset=utf-8"),
        ("/sw.js", "text/javascript; charset=utf-8"),
        ("/app.webmanifest", "application/manifest+json"),
        ("/bundle/manifest.json", "application/json"),
        ("/bundle/drafter.onnx", "application/octet-stream"),
        ("/ort-wasm-simd-threaded.wasm", "application/wasm"),
        ("/missing", "text/plain; charset=utf-8"),
    ],
)
def test_headers(client: httpx.Client, path: str, kind: str) -> None:
    answer = client.get(path)
    assert answer.status_code == (404 if path == "/missing" else 200)
    assert answer.headers["content-type"] == kind
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self' 'wasm-unsafe-eval';")
    assert "unsafe-inline" not in policy
    assert " 'unsafe-eval'" not in policy
    assert answer.headers["cross-origin-opener-policy"] == "same-origin"
    assert answer.headers["cross-origin-embedder-policy"] == "require-corp"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert answer.headers["x-content-type-options"] == "nosniff"
    wanted = "no-store" if path.startswith("/bundle/") else "no-cache"
    assert answer.headers["cache-control"] == wanted


def test_server_js_is_the_device_s(client: httpx.Client) -> None:
    assert client.get("/server.js").text == "// server.js\n"


def test_the_page_is_told_whether_there_may_be_versions(
    client: httpx.Client, device_models: Path, tmp_path: Path
) -> None:
    scripts = fake_scripts(tmp_path)
    page = DevicePage(device_models / "bundle", scripts, model="tiny", learns=False)
    assert not json.loads(page._texts["/device.json"])["learns"]
    assert client.get("/device.json").json()["learns"]


def test_the_runtime_is_stored_compressed(client: httpx.Client) -> None:
    answer = client.get("/ort-wasm-simd-threaded.wasm")
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.content == WASM


def test_files_are_not_sent_again(client: httpx.Client) -> None:
    tag = client.get("/app.js").headers["etag"]
    assert client.get("/app.js", headers={"If-None-Match": tag}).status_code == 304
    assert client.get("/app.js", headers={"If-None-Match": '"other"'}).status_code == 200


def test_the_service_worker_keeps_all_that_the_page_needs(client: httpx.Client) -> None:
    first, script = client.get("/sw.js").text.split("\n", 1)
    assert script == "// sw.js\n"
    info = json.loads(first.removeprefix("self.MOASPEC = ").removesuffix(";"))
    paths = set(info["paths"])
    assert {"/", "/app.js", "/server.js", "/worker.js", "/device.json"} < paths
    assert not paths & {"/index.html", "/sw.js"}
    assert not any(path.startswith("/bundle/") for path in paths)
    for path in paths:
        assert client.get(path).status_code == 200


def test_another_file_makes_another_version(device_models: Path, tmp_path: Path) -> None:
    def version() -> str:
        page = DevicePage(device_models / "bundle", fake, model="tiny")
        return page._texts["/sw.js"].decode().split('"')[3]

    fake = fake_scripts(tmp_path)
    before = version()
    assert version() == before
    (fake / "worker.js").write_text("// changed\n")
    assert version() != before


@pytest.mark.parametrize(
    "path", ["/../pyproject.toml", "/%2e%2e/app.py", "/bundle/../../target/config.json", "//app.js"]
)
def test_no_other_file_can_be_read(server: PageServer, path: str) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as link:
        link.sendall(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()
        )
        answer = b"".join(iter(lambda: link.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 404")


def test_other_methods_are_refused(client: httpx.Client) -> None:
    assert client.post("/", content=b"x").status_code == 405
    assert client.head("/").status_code == 200


@pytest.mark.parametrize(
    "line", [b"\r\n\r\n", b"x" * 20_000, b"GET\r\n\r\n", b"\xff\xfe /\r\n\r\n"]
)
def test_nonsense_ends_the_connection(server: PageServer, line: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as link:
        link.sendall(line)
        link.shutdown(socket.SHUT_WR)
        try:
            answer = b"".join(iter(lambda: link.recv(65536), b""))
        except ConnectionResetError:
            answer = b""
    assert not answer or answer.startswith(b"HTTP/1.1 400")


def test_health_is_still_there(client: httpx.Client) -> None:
    with httpx.Client(base_url=client.base_url) as fresh:
        assert fresh.get("/health").text == "SERVING\n"


def test_a_connection_has_one_request(server: PageServer) -> None:
    """A proxy that kept it would send calls to the page."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as link:
        link.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        answer = b"".join(iter(lambda: link.recv(65536), b""))
    head, _, _ = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in head.lower()


def test_a_download_goes_on_where_it_ended(client: httpx.Client) -> None:
    whole = client.get("/bundle/tokenizer.json").content
    rest = client.get("/bundle/tokenizer.json", headers={"Range": "bytes=100-"})
    assert rest.status_code == 206
    assert rest.content == whole[100:]


async def until_cut(send_all: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Any]:
    """A client of an application that goes on sending, and the server to close."""
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(page_protocols(send_all), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
    writer.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    return reader, writer, listener


def test_a_client_that_takes_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a response is on its way, no other deadline runs."""
    monkeypatch.setattr("moaspec_edge.http.device_page.MAX_STALL_S", 0.1)

    async def silent(_scope: Any, receive: Any, _send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def run() -> None:
        reader, writer, listener = await until_cut(silent)
        async with listener:
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 60) == b""
            writer.close()

    asyncio.run(run())


def test_a_slow_client_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is taken postpones the end."""
    delays: list[float] = []
    monkeypatch.setattr("moaspec_edge.http.device_page.MAX_STALL_S", 1234.5)
    piece, num_pieces = bytes(1 << 20), 64

    async def large(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for left in reversed(range(num_pieces)):
            await send({"type": "http.response.body", "body": piece, "more_body": left > 0})

    async def run() -> None:
        loop = asyncio.get_running_loop()
        later = loop.call_later

        def call_later(delay: float, *rest: Any) -> asyncio.TimerHandle:
            delays.append(delay)
            return later(delay, *rest)

        monkeypatch.setattr(loop, "call_later", call_later)
        reader, writer, listener = await until_cut(large)
        async with listener:
            assert len(await asyncio.wait_for(reader.read(), 60)) > num_pieces * len(piece)
            writer.close()

    asyncio.run(run())
    # Sockets take some pieces at once; the rest waits for the client.
    assert delays.count(1234.5) > 2


@pytest.mark.parametrize(
    ("host", "origin", "accepted"),
    [
        ("127.0.0.1", "http://127.0.0.1", True),
        ("localhost", "http://localhost", True),
        ("127.0.0.1", "http://localhost", False),
        ("127.0.0.1", "https://127.0.0.1", False),
        ("127.0.0.1", "http://example.org", False),
        ("rebound.example.org", "http://rebound.example.org", False),
        ("127.0.0.1", None, True),
    ],
)
def test_whose_pages_may_connect(
    server: PageServer, host: str, origin: str | None, accepted: bool
) -> None:
    port = f":{server.port}"

    async def status() -> int:
        link: Any = connect(
            f"ws://{host}{port}/v1/describe",
            host="127.0.0.1",
            port=server.port,
            origin=None if origin is None else origin + port,  # type: ignore[arg-type]
            subprotocols=["moaspec.v1"],  # type: ignore[list-item]
        )
        try:
            async with link:
                return 101
        except InvalidStatus as refused:
            return refused.response.status_code

    assert asyncio.run(status()) == (101 if accepted else 403)


def test_missing_scripts_are_named_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="make device-page"):
        find_scripts(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"garbage", gzip.compress(WASM)[:-9], gzip.compress(b"x")],
    ids=["empty", "no archive", "cut", "other content"],  # archives hold the time they were made
)
def test_damaged_scripts_are_refused(content: bytes, tmp_path: Path) -> None:
    assert find_scripts(fake_scripts(tmp_path)) == tmp_path
    (tmp_path / "ort-wasm-simd-threaded.wasm.gz").write_bytes(content)
    with pytest.raises(InputError, match="damaged"):
        find_scripts(tmp_path)


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--page-scripts needs --page"):
        _scripts(None, tmp_path)
    assert _scripts(None, None) is None


def test_no_bundle(scripts: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no ONNX bundle"):
        DevicePage(tmp_path, scripts, model="tiny")


def test_a_bundle_of_another_drafter(device_models: Path, scripts: Path) -> None:
    service: Any = SimpleNamespace(capabilities=SimpleNamespace(serves=lambda _: False))
    with pytest.raises(InputError, match="another drafter"):
        _page(device_models / "bundle", scripts, "tiny", service, learns=False)
    assert _page(None, None, "tiny", service, learns=False) is None
