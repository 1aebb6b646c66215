"""`moaspec target-server`: what it refuses, and a life from start to SIGTERM."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import moaspec
import tiny
from commands import Cli, text_target
from moaspec.remote.device.link import LinkOptions
from moaspec.remote.device.local_parts import LocalDevice
from moaspec.remote.device.remote_session import RemoteOptions, RemoteSession
from moaspec.remote.protocol.grpc_transport import GrpcTransport


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--host", "0.0.0.0"], "without TLS"),
        (["--tls-key", "key.pem"], "come together"),
        (["--client-ca", "ca.pem"], "--client-ca needs"),
        (["--tokens", "nowhere.json"], "Cannot read nowhere.json"),
    ],
)
def test_bad_settings_are_noticed_before_anything_is_loaded(
    cli: Cli, arguments: list[str], why: str
) -> None:
    output = cli("target-server", *arguments)
    assert output.code == 2
    assert why in " ".join(output.err.split())


@pytest.mark.slow
def test_a_server_from_start_to_sigterm(tmp_path: Path) -> None:
    target = text_target()
    target.model.save_pretrained(tmp_path)
    assert target.tokenizer is not None
    target.tokenizer.save_pretrained(tmp_path)
    arguments = ["target-server", "--model", str(tmp_path), "--port", "0", "--threads", "1"]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(
        [sys.executable, "-m", "moaspec", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as server:
        try:
            assert server.stdout is not None
            address = json.loads(server.stdout.readline())["address"]
            asyncio.run(_read(moaspec.load_target(str(tmp_path)), address))
            server.send_signal(signal.SIGTERM)
            assert server.wait(120) == 0
        finally:
            server.kill()


async def _read(target: moaspec.Target, address: str) -> None:
    options = RemoteOptions(link=LinkOptions(dead_after_s=60.0, connect_s=60.0))
    device = LocalDevice(target, moaspec.NgramProposer())
    session = RemoteSession(device, GrpcTransport(address), options)
    got = await session.generate(tiny.PROMPTS[0], max_new_tokens=8)
    expected = moaspec.generate(target, tiny.PROMPTS[0], max_new_tokens=8)
    assert got.token_ids == expected.token_ids
    await session.close()
