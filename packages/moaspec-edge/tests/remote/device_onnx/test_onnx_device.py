"""Sessions of a device that drafts by onnxruntime: the same text, rounds and events."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import moaspec
import tiny
from bundles import save_drafter_and_target
from links import FaultyTransport
from moaspec.backends.load import load_target
from moaspec.generation.drafters import load_drafter
from moaspec_core.drafting.draft_tree import Tree
from moaspec_core.drafting.protocols import RequestText
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.errors import CorruptCheckpointError, InputError
from moaspec_core.sampling.params import SamplingParams
from moaspec_edge.device.device_parts import Device
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.device_onnx.manifest import MANIFEST_FILE
from moaspec_edge.protocol.transport import InProcessTransport
from moaspec_edge.server.service import TargetService
from simulated_time import run_simulated

pytest.importorskip("onnx", reason="moaspec-edge[export] is not installed")
pytest.importorskip("onnxruntime", reason="moaspec-edge[export] is not installed")

from moaspec_edge.device_onnx.onnx_bundle import export_onnx
from moaspec_edge.device_onnx.onnx_device import OnnxDevice

SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 11}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle in float32, so that its drafts are those of PyTorch."""
    directory = tmp_path_factory.mktemp("device")
    save_drafter_and_target(directory)
    export_onnx(
        directory / "target", directory / "drafter", directory / "bundle", weights="float32"
    )
    return directory


class Server:
    """A service of the target behind the bundle."""

    def __init__(self, directory: Path) -> None:
        self.target = load_target(directory / "target", dtype="float32")
        self.drafter = load_drafter(directory / "drafter", target=self.target)

    async def text(
        self, device: Device, *, options: RemoteOptions, cut: bool = False, **settings: Any
    ) -> tuple[list[int], RemoteSession]:
        """The text as a reader of events has it; with `cut`, the link is gone for a while."""
        service = TargetService(self.target, self.drafter)
        inner = InProcessTransport(service)
        transport = FaultyTransport(lambda: inner)
        session, text = RemoteSession(device, transport, options), list[int]()
        alone = 0
        async for event in session.stream(tiny.PROMPTS[1], max_new_tokens=24, **settings):
            text[event.start :] = event.token_ids
            if cut and len(text) >= 5:
                transport.hole, cut = True, False
            alone += bool(event.num_provisional)
            if alone == 4:
                transport.hole = False
        await session.close()
        await service.stop()
        return text, session


@pytest.fixture(scope="module")
def server(made: Path) -> Server:
    return Server(made)


@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_text_and_rounds_are_those_of_pytorch(
    made: Path, server: Server, codec: Any, settings: dict[str, Any]
) -> None:
    options = RemoteOptions(draft=Chain(3), codec=codec, draft_ahead=False)
    found = [
        run_simulated(server.text(device, options=options, **settings))
        for device in (OnnxDevice(made / "bundle"), LocalDevice(server.target, server.drafter))
    ]
    (text, session), (theirs, reference) = found
    assert (
        text
        == theirs
        == moaspec.generate(server.target, tiny.PROMPTS[1], max_new_tokens=24, **settings).token_ids
    )
    assert session.result.accept_lengths == reference.result.accept_lengths
    assert session.result.sources == reference.result.sources


@pytest.mark.parametrize("codec", ["fp16", "int4"])
def test_reused_layers_draft_as_in_pytorch(tmp_path: Path, codec: Any) -> None:
    save_drafter_and_target(tmp_path, num_target_layers=(2,))
    models = tmp_path / "target", tmp_path / "drafter"
    export_onnx(*models, tmp_path / "bundle", weights="float32")
    server = Server(tmp_path)
    options = RemoteOptions(draft=Chain(3), codec=codec)
    devices = OnnxDevice(tmp_path / "bundle"), LocalDevice(server.target, server.drafter)
    for cut in (False, True):
        chosen = dataclasses.replace(options, draft_ahead=cut)
        found = [run_simulated(server.text(one, options=chosen, cut=cut)) for one in devices]
        (text, session), (theirs, reference) = found
        assert text == theirs
        if not cut:
            assert session.result.accept_lengths == reference.result.accept_lengths


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft", ["auto", Chain(2)], ids=str)
def test_a_cut_changes_nothing(
    made: Path, server: Server, draft: Any, settings: dict[str, Any]
) -> None:
    options = RemoteOptions(draft=draft)
    device = OnnxDevice(made / "bundle")
    text, session = run_simulated(server.text(device, options=options, cut=True, **settings))
    assert (
        text
        == moaspec.generate(server.target, tiny.PROMPTS[1], max_new_tokens=24, **settings).token_ids
    )
    assert session.stats.provisional >= 4


def test_drafts_go_on_where_the_verified_text_agrees(made: Path) -> None:
    """After a rollback the drafts are those of a drafter that has read the text anew."""
    device = OnnxDevice(made / "bundle")
    sampling = SamplingParams(temperature=0.8, seed=5)
    one, text = device.drafting(), list(tiny.PROMPTS[1])
    layout = one.layout("fp16")
    records = bytes(len(text) * layout.token_bytes)
    one.place_activations(0, 0, layout.decode(records, len(text)))
    (tree,) = one.propose([RequestText(0, text, sampling)], Chain(4))
    for kept in (4, 2, 0):
        longer = [*text, *tree.tokens[:kept], 3, 4]
        one.rollback(0, len(text) + kept)
        other = device.drafting()
        other.place_activations(0, 0, layout.decode(records, len(text)))
        row = RequestText(0, longer, sampling)
        assert one.propose([row], Chain(3)) == other.propose([row], Chain(3))


def test_what_it_knows_of_the_target(made: Path, server: Server) -> None:
    ours, theirs = OnnxDevice(made / "bundle").target, server.target
    for name in (
        *("identity", "vocab_size", "max_positions", "rope_switches", "rope_growth"),
        *("stop_token_ids", "generation_defaults"),
    ):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_trees_and_layers_are_refused(made: Path, server: Server) -> None:
    device = OnnxDevice(made / "bundle")
    with pytest.raises(InputError, match="drafts chains, no tree:2x2x4"):
        run_simulated(server.text(device, options=RemoteOptions(draft=Tree(2, 2, 4))))
    with pytest.raises(InputError, match="this ONNX bundle is for 0"):
        device.drafting(2)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"law": 1}, InputError),
        ({"target": {}}, CorruptCheckpointError),
        ({"target": {"vocab_size": "many"}}, CorruptCheckpointError),
    ],
)
def test_a_bundle_that_does_not_fit_is_refused(
    made: Path, tmp_path: Path, change: dict[str, Any], error: type[Exception]
) -> None:
    export_onnx(made / "target", made / "drafter", tmp_path / "bundle", weights="float32")
    file = tmp_path / "bundle" / MANIFEST_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(error):
        OnnxDevice(tmp_path / "bundle")


def test_sessions_share_weights_and_no_caches(made: Path) -> None:
    device = OnnxDevice(made / "bundle")
    one, other = device.drafting(), device.drafting()
    assert one._drafter._session is other._drafter._session
    assert one._drafter.caches["text_key"] is not other._drafter.caches["text_key"]
    assert dataclasses.is_dataclass(device.target.identity)
