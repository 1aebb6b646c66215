"""A server's drafter learns from what devices write, and they take its versions meanwhile."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

import ruled_target
import tiny
from moaspec.generation.drafters import load_drafter
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_edge.cli.learning import announce, learning_from_texts
from moaspec_edge.device.bundle import export_bundle, load_device
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.protocol.fleet import Fleet
from moaspec_edge.protocol.websocket_transport import WebSocketTransport
from moaspec_edge.server.listeners.websocket_server import ServerOptions, TargetServer
from moaspec_edge.server.service import TargetService
from moaspec_train.continual import fingerprints
from moaspec_train.learning_process import MAX_WAITING_TEXTS, LearningProcess

pytest.importorskip("onnx", reason="moaspec-edge[export] is not installed")
pytest.importorskip("onnxruntime", reason="moaspec-edge[export] is not installed")

from moaspec_edge.device_onnx.onnx_bundle import export_onnx
from moaspec_edge.device_onnx.onnx_device import OnnxDevice


@pytest.mark.slow
@pytest.mark.usefixtures("patient_link")
def test_connected_devices_take_what_their_server_learned(tmp_path: Path) -> None:
    of, settings = ruled_target.target(), ruled_target.saved_settings(tmp_path)
    models = settings.target, settings.initial
    export_bundle(*models, tmp_path / "torch")
    export_onnx(*models, tmp_path / "onnx", weights="float32")
    told = list[str]()
    learning = LearningProcess(settings, told.append)
    service = TargetService(of, load_drafter(settings.initial, target=of))
    devices: list[Any] = [
        load_device(tmp_path / "torch", dtype="float32"),
        OnnxDevice(tmp_path / "onnx"),
    ]

    async def run() -> None:
        announce(service, learning)
        async with (
            TargetServer(service, ServerOptions(port=0)) as server,
            learning_from_texts(service, learning),
        ):
            transport = Fleet.of(WebSocketTransport(server.url))
            options = RemoteOptions(draft=Chain(4))
            sessions = [RemoteSession(device, transport, options) for device in devices]
            stream = itertools.cycle(ruled_target.stream())

            async def turn(session: RemoteSession) -> None:
                prompt, text = next(stream)
                made, _ = await asyncio.gather(
                    session.generate(prompt, max_new_tokens=tiny.NEW_TOKENS, temperature=0.0),
                    session.device.update(transport),
                )
                assert tuple(made.token_ids) == text

            while any(device.version == device.fingerprint for device in devices):
                assert learning.status.running
                while learning._texts.qsize() > MAX_WAITING_TEXTS // 2:
                    await asyncio.sleep(0.05)
                for session in sessions:
                    await turn(session)
            for session in sessions:
                await turn(session)  # with the version that came in the turn before
                assert session.stats.cuts == 0
                await session.close()

    asyncio.run(run())
    made = fingerprints(settings.directory)
    assert {device.version for device in devices} <= set(made[1:])
    assert told[0] == "A learning cycle begins."
    assert any("made version 1: held-out tau" in said for said in told)
