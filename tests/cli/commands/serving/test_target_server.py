"""`moaspec target-server`: what it refuses, and a life from start to SIGTERM."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import moaspec
import tiny
from commands import Cli, text_target
from moaspec_edge.cli.target_server import _end_process
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteSession
from moaspec_edge.protocol.transport import Transport
from moaspec_edge.protocol.websocket_transport import WebSocketTransport

pytestmark = [pytest.mark.essential, pytest.mark.usefixtures("patient_link")]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--host", "0.0.0.0"], "without TLS"),
        (["--key", "key.pem"], "come together"),
        (["--drafter", "none", "--learn", "learnt"], "--learn needs a drafter"),
        (["--client-ca", "ca.pem"], "--client-ca needs"),
        (["--tokens", "nowhere.json"], "Error: Cannot read nowhere.json: No such file"),
        (["--websocket", "0.0.0.0:8443"], "was renamed to --host and --port"),
        (["--allow-origin", "example.org"], "--allow-origin must be an origin"),
        (["--allow-origin", "*"], "--allow-origin must be an origin"),
        (["--tensor-parallel-size", "2"], "is for --engine vllm"),
    ],
)
def test_bad_settings_are_noticed_before_anything_is_loaded(
    cli: Cli, arguments: list[str], why: str
) -> None:
    output = cli("target-server", *arguments)
    assert output.code == 2
    assert why in " ".join(output.err.split())


def test_a_server_whose_rank_has_died_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", end)
    stopping = threading.Event()
    with pytest.raises(SystemExit) as ended:
        _end_process(stopping)
    assert ended.value.code == 1
    assert "A process of vLLM has ended" in capsys.readouterr().err
    stopping.set()  # a stop was asked for
    with pytest.raises(SystemExit) as ended:
        _end_process(stopping)
    assert ended.value.code == 0
    assert "are cut off" in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_from_start_to_sigterm(tmp_path: Path) -> None:
    target = text_target()
    target.model.save_pretrained(tmp_path)
    assert target.tokenizer is not None
    target.tokenizer.save_pretrained(tmp_path)
    arguments = ["target-server", "--model", str(tmp_path), "--port", "0", "--threads", "1"]
    arguments += ["--allow-origin", "https://example.org"]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(
        [sys.executable, "-m", "moaspec", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as server:
        try:
            assert server.stdout is not None
            assert server.stderr is not None
            data = json.loads(server.stdout.readline())
            read = moaspec.load_target(str(tmp_path))
            asyncio.run(_read(read, WebSocketTransport(data["address"])))
            server.send_signal(signal.SIGTERM)
            assert server.wait(120) == 0
            assert server.stderr.read().count("Draining") == 1
        finally:
            server.kill()


async def _read(target: moaspec.Target, transport: Transport) -> None:
    device = LocalDevice(target, moaspec.NgramProposer())
    session = RemoteSession(device, transport)
    got = await session.generate(tiny.PROMPTS[0], max_new_tokens=8)
    expected = moaspec.generate(target, tiny.PROMPTS[0], max_new_tokens=8)
    assert got.token_ids == expected.token_ids
    await session.close()
