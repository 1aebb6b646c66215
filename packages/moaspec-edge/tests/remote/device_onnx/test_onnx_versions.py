"""A device with an ONNX bundle takes new versions of a server's drafter."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import moaspec
import tiny
from bundles import save_target
from moaspec.generation.drafters import load_drafter
from moaspec.model.checkpoint.moa_checkpoint import fingerprint, save_drafter
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_core.drafting.protocols import RequestText
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.errors import CorruptCheckpointError, RefusedError
from moaspec_edge.device.device_parts import Device, DeviceProposer
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol.fleet import Fleet
from moaspec_edge.protocol.websocket_transport import WebSocketTransport
from moaspec_edge.server.listeners.websocket_server import ServerOptions, TargetServer
from moaspec_edge.server.service import TargetService

pytest.importorskip("onnx", reason="moaspec-edge[export] is not installed")
pytest.importorskip("onnxruntime", reason="moaspec-edge[export] is not installed")

from moaspec_edge.device_onnx.manifest import GRAPH_FILE, MANIFEST_FILE, read_manifest
from moaspec_edge.device_onnx.onnx_bundle import export_onnx, packed_version
from moaspec_edge.device_onnx.onnx_device import OnnxDevice
from moaspec_edge.device_onnx.onnx_ops import Weights

PROMPT = tiny.PROMPTS[1]
OPTIONS: dict[str, Any] = {"max_new_tokens": tiny.NEW_TOKENS, "temperature": 0.0}


def save_versions(directory: Path, exits: tuple[int, ...] = (0,)) -> None:
    """A target, a drafter, and a version of it with another decoder."""
    target = save_target(directory / "target")
    first = tiny.random_drafter(target, exits=exits)
    version = tiny.random_drafter(target, exits=exits, seed=9)
    version.encoder.load_state_dict(first.encoder.state_dict())
    for name, drafter in (("drafter", first), ("version", version)):
        save_drafter(drafter, directory / name)


def exported(directory: Path, of: str, weights: Weights = "float32", layers: int = 0) -> Path:
    """A bundle of one of the two."""
    made = directory / f"{of}-{weights}-{layers}"
    if not made.exists():
        models = directory / "target", directory / of
        export_onnx(*models, made, weights=weights, num_target_layers=layers)
    return made


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("versions")
    save_versions(directory)
    return directory


def served(models: Path) -> tuple[Target, MoADrafter, MoADrafter]:
    target = moaspec.load_target(models / "target", dtype="float32")
    first, version = (load_drafter(models / name, target=target) for name in ("drafter", "version"))
    return target, first, version


class Sender:
    """A server that announces a version and sends these pieces."""

    def __init__(self, *pieces: bytes, packing: str | None = None) -> None:
        self.pieces, self.packing, self.sent = pieces, packing, 0

    async def describe(self) -> pb.Description:
        return pb.Description(newest="new")

    async def weights(self, packing: str = "") -> AsyncGenerator[pb.Weights]:
        for piece in self.pieces:
            self.sent += 1
            form = packing if self.packing is None else self.packing
            yield pb.Weights(data=piece, version="new", packing=form)


def edit(bundle: Path, versions: Any) -> None:
    path = bundle / MANIFEST_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"versions": versions}))


def update(device: Device, sender: Sender) -> bool:
    return asyncio.run(device.update(sender))  # type: ignore[arg-type]


def graph(directory: Path) -> bytes:
    return (directory / GRAPH_FILE).read_bytes()


def chain(device: Device, text: Sequence[int] = PROMPT) -> list[int]:
    """Drafts after a text with some activations."""
    drafting = device.drafting(0)
    assert isinstance(drafting, DeviceProposer)
    layout = drafting.layout("int8")
    count = len(text) - 1
    random = np.random.default_rng(0)
    data = random.integers(0, 64, count * layout.token_bytes, dtype=np.uint8).tobytes()
    drafting.place_activations(0, 0, layout.decode(data, count))
    (tree,) = drafting.propose([RequestText(0, text)], Chain(4))
    return list(tree.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("weights", get_args(Weights))
@pytest.mark.parametrize("layers", [0, 2])
def test_a_version_makes_the_graph_of_its_own_bundle(
    tmp_path: Path, weights: Weights, layers: int
) -> None:
    """Byte by byte, so it drafts as one exported from it; also where N has its own adapter."""
    save_versions(tmp_path, exits=(0, 2))
    bundle = exported(tmp_path, "drafter", weights, layers)
    versions = read_manifest(bundle).versions
    assert versions is not None
    assert versions.packing.endswith(f"{weights}/{layers}")
    _, _, version = served(tmp_path)
    data = packed_version(version, versions.packing)
    assert data is not None
    device = OnnxDevice(bundle)
    changed = device._drafter._graph_of(data)
    assert changed == graph(exported(tmp_path, "version", weights, layers)) != graph(bundle)
    assert update(device, Sender(data[:100], data[100:]))
    assert device.version == "new"


def test_it_drafts_as_the_version_does_in_pytorch(models: Path) -> None:
    target, first, version = served(models)
    device = OnnxDevice(exported(models, "drafter"))
    before, after = chain(LocalDevice(target, first)), chain(LocalDevice(target, version))
    assert chain(device) == before != after
    data = packed_version(version, device._drafter.manifest.versions.packing)  # type: ignore[union-attr]
    assert update(device, Sender(data or b""))
    assert chain(device) == after


@pytest.mark.slow
@pytest.mark.usefixtures("patient_link")
def test_a_running_session_takes_versions_and_a_roll_back(models: Path) -> None:
    """The turn in which one arrives goes on, the next one drafts with it."""
    target, first, version = served(models)
    plain = moaspec.generate(target, PROMPT, **OPTIONS).token_ids
    options = RemoteOptions(draft=Chain(3), draft_ahead=False)

    async def run() -> None:
        service, device = TargetService(target, first), OnnxDevice(exported(models, "drafter"))
        async with TargetServer(service, ServerOptions(port=0)) as server:
            transport = Fleet.of(WebSocketTransport(server.url))
            session = RemoteSession(device, transport, options)
            assert not await device.update(transport)  # there is none yet
            for number, drafter in enumerate((version, first)):
                text, before = list[int](), session._drafting._drafter._session  # type: ignore[attr-defined]
                async for event in session.stream([*PROMPT, *plain[:number]], **OPTIONS):
                    if not text:
                        service.adopt(drafter, fingerprint(drafter))
                        assert await device.update(transport)
                        assert not await device.update(transport)
                    text[event.start :] = event.token_ids
                assert text[: len(plain) - number] == plain[number:]
                assert device.version == fingerprint(drafter)
                assert chain(device) == chain(LocalDevice(target, drafter))
                assert session._drafting._drafter._session is before  # type: ignore[attr-defined]
                device.renew(session._drafting)
                assert session._drafting._drafter._session is not before  # type: ignore[attr-defined]
            assert device.version == device.fingerprint
            await session.close()

    asyncio.run(run())


def test_sessions_take_a_version_at_their_next_turn(models: Path) -> None:
    _, _, version = served(models)
    device = OnnxDevice(exported(models, "drafter"))
    drafting = device.drafting()
    old = drafting._drafter._session
    data = packed_version(version, "onnx/1/float32/0")
    assert update(device, Sender(data or b""))
    assert drafting._drafter._session is old
    assert device.drafting()._drafter._session is not old
    text = list(PROMPT)
    drafting.propose([RequestText(0, text)], Chain(2))
    device.renew(drafting)
    assert drafting._drafter._session is not old
    assert drafting._num_read == 0
    device.renew(drafting)
    assert drafting.propose([RequestText(0, text)], Chain(2)) == device.drafting().propose(
        [RequestText(0, text)], Chain(2)
    )


# Damage


@pytest.mark.parametrize("fault", ["short", "endless", "not finite", "safetensors", "none"])
def test_weights_that_do_not_fit_are_refused(fault: str, models: Path) -> None:
    """The device goes on drafting with what it has."""
    device = OnnxDevice(exported(models, "drafter"))
    _, _, version = served(models)
    data = packed_version(version, "onnx/1/float32/0") or b""
    sender = {
        "short": Sender(data[:-1]),
        "endless": Sender(*[bytes(len(data) // 2)] * 100),
        "not finite": Sender(np.full(len(data) // 4, np.nan, np.float32).tobytes()),
        "safetensors": Sender(data, packing=""),
        "none": Sender(),
    }[fault]
    before, drafter = chain(device), device._drafter
    if fault == "none":
        assert not update(device, sender)
    else:
        with pytest.raises(RefusedError, match="The server"):
            update(device, sender)
    assert sender.sent < 10
    assert (device._drafter, device.version) == (drafter, device.fingerprint)
    assert chain(device) == before


def test_a_bundle_that_was_replaced_takes_no_version(models: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    export_onnx(models / "target", models / "drafter", bundle, weights="float32")
    device = OnnxDevice(bundle)
    _, _, version = served(models)
    (bundle / GRAPH_FILE).write_bytes(b"another")
    with pytest.raises(RefusedError, match="has changed since it was loaded"):
        update(device, Sender(packed_version(version, "onnx/1/float32/0") or b""))


def test_a_bundle_without_ranges_keeps_its_version(models: Path, tmp_path: Path) -> None:
    """As those of earlier releases."""
    export_onnx(models / "target", models / "drafter", tmp_path / "bundle", weights="float32")
    edit(tmp_path / "bundle", None)
    sender = Sender(b"never read")
    assert not update(OnnxDevice(tmp_path / "bundle"), sender)
    assert sender.sent == 0


@pytest.mark.parametrize(
    "ranges", [[], [[5, 5], [9, 1]], [[0, 10**9]], [[-1, 4]], [[0, 0]], [[0.5, 1]], [[1]], 3]
)
def test_wrong_ranges(models: Path, tmp_path: Path, ranges: Any) -> None:
    export_onnx(models / "target", models / "drafter", tmp_path / "bundle", weights="float32")
    edit(tmp_path / "bundle", {"packing": "onnx/1/float32/0", "ranges": ranges})
    with pytest.raises(CorruptCheckpointError, match=MANIFEST_FILE.partition(".")[0]):
        read_manifest(tmp_path / "bundle")


# The server


def test_a_server_says_once_what_it_cannot_send(
    models: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target, first, version = served(models)

    async def run() -> None:
        service = TargetService(target, first)
        assert await service.device_weights("onnx/1/int8/0") == ("", b"")  # no version yet
        service.adopt(version, "new")
        for packing in ("onnx/0/int8/0", "onnx/1/int8/9", "onnx/1/int2/0", "x" * 999):
            assert await service.device_weights(packing) == ("new", b"")
        assert caplog.text.count("none were sent: unknown.") == 1
        assert service._weights._made == {}
        found = await asyncio.gather(*(service.device_weights("onnx/1/int8/0") for _ in range(3)))
        assert found == [("new", packed_version(version, "onnx/1/int8/0"))] * 3
        other = TargetService(target, first)
        other.adopt(version, "new")
        monkeypatch.setitem(sys.modules, "moaspec_edge.device_onnx.onnx_bundle", None)
        assert await other.device_weights("onnx/1/int8/0") == ("new", b"")
        assert "is not installed" in caplog.text
        for one in (service, other):
            await one.stop()

    asyncio.run(run())
