"""`moaspec checkpoint export-device`, and `moaspec info` of a bundle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tiny
from bundles import save_drafter_and_target, save_target
from commands import Cli
from moaspec.model.checkpoint.moa_checkpoint import save_drafter
from moaspec_core.support.extras import MODULES


@pytest.mark.slow
def test_export_and_info(tmp_path: Path, cli: Cli) -> None:
    target, drafter, out = tmp_path / "target", tmp_path / "drafter", tmp_path / "device"
    save_drafter(tiny.random_drafter(save_target(target)), drafter)
    output = cli("checkpoint", "export-device", str(target), str(drafter), str(out), "--bits", "8")
    assert output.code == 0, output.err
    data = json.loads(cli("info", str(out), "--json").out)
    assert (data["format"], data["weights"]) == ("device bundle", "int8")
    assert data["target"]["vocab_size"] == tiny.VOCAB
    assert data["draft_vocabulary"] == "full"
    assert "device bundle" in cli("info", str(out)).words
    # It is no drafter, and said so only by what its tensors lacked; vLLM by nothing.
    for command in (("generate", "w1", "--drafter"), ("vllm-config",)):
        refused = cli(*command, str(out), "--model", str(target))
        assert refused.code == 2
        assert "is a device bundle, for" in refused.error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "weights", "versions"),
    [
        (("onnx",), "float32", "onnx/1/float32/0"),
        (("onnx", "--bits", "8"), "int8", "onnx/1/int8/0"),
        (("onnx", "--bits", "4"), "int4", "onnx/1/int4/0"),
        (("onnx-web", "--bits", "8"), "int8-web", "onnx/2/int8-web/0"),
        (("onnx-web", "--bits", "4"), "int4-web", "onnx/1/int4-web/0"),
    ],
)
def test_export_and_info_of_onnx(
    tmp_path: Path, cli: Cli, options: tuple[str, ...], weights: str, versions: str
) -> None:
    pytest.importorskip("onnx", reason="moaspec-edge[export] is not installed")
    pytest.importorskip("onnxruntime", reason="moaspec-edge[export] is not installed")
    save_drafter_and_target(tmp_path)
    models = str(tmp_path / "target"), str(tmp_path / "drafter"), str(tmp_path / "device")
    output = cli("checkpoint", "export-device", *models, "--format", *options)
    assert output.code == 0, output.err
    assert ("a browser holds" in output.words) is weights.endswith("-web")
    data = json.loads(cli("info", str(tmp_path / "device"), "--json").out)
    assert (data["format"], data["weights"]) == ("ONNX device bundle", weights)
    assert data["versions"] == versions
    assert data["target"]["vocab_size"] == tiny.VOCAB


@pytest.mark.slow
@pytest.mark.parametrize("too_large", [False, True])
def test_a_page_that_needs_much_memory(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, too_large: bool
) -> None:
    pytest.importorskip("onnx", reason="moaspec-edge[export] is not installed")
    pytest.importorskip("onnxruntime", reason="moaspec-edge[export] is not installed")
    save_drafter_and_target(tmp_path)
    if too_large:
        monkeypatch.setattr("moaspec_edge.cli.export_device.MAX_WASM_BYTES", 0)
    models = str(tmp_path / "target"), str(tmp_path / "drafter"), str(tmp_path / "device")
    output = cli("checkpoint", "export-device", *models, "--format", "onnx-web")
    assert output.code == 0, output.err
    assert "a browser holds" in output.words
    assert ("at most 4 GB" in output.err) is too_large


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            (
                "--bits",
                "4",
            ),
            "--format onnx",
        ),
        (("--format", "onnx", "--bits", "5"), "'5' is not one of '8', '4'"),
    ],
)
def test_options_that_exclude_each_other(
    tmp_path: Path,
    cli: Cli,
    options: tuple[str, ...],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anything is loaded, so also without the extra."""
    monkeypatch.setitem(MODULES, "moaspec-edge[export]", ())
    output = cli("checkpoint", "export-device", "x", "y", str(tmp_path / "out"), *options)
    assert output.code == 2
    assert named in output.err


def test_what_cannot_be_exported(tmp_path: Path, cli: Cli) -> None:
    missing = cli("checkpoint", "export-device", "no/target", "nothing", str(tmp_path / "out"))
    assert missing.code == 2
    assert "No drafter 'nothing'" in missing.err  # a target takes longer to load
    (tmp_path / "taken").write_text("mine")
    for place, options in ((tmp_path / "taken", ()), (tmp_path, ("--num-target-layers", "-1"))):
        refused = cli("checkpoint", "export-device", "x", "y", str(place), *options)
        assert refused.code == 2
        assert "Loading" not in refused.err
    others = cli("checkpoint", "export-device", "x", "y", str(tmp_path))
    assert "holds no device bundle" in others.err
    assert "Loading" not in others.err
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize("form", ["torch", "onnx"])
def test_an_n_that_the_drafter_was_not_trained_for(tmp_path: Path, cli: Cli, form: str) -> None:
    """It was written into the bundle, with target layers that no draft passes."""
    if form == "onnx":
        pytest.importorskip("onnx", reason="moaspec-edge[export] is not installed")
        pytest.importorskip("onnxruntime", reason="moaspec-edge[export] is not installed")
    save_drafter_and_target(tmp_path)
    out = tmp_path / "device"
    models = str(tmp_path / "target"), str(tmp_path / "drafter"), str(out), "--format", form
    refused = cli("checkpoint", "export-device", *models, "--num-target-layers", "1")
    assert (refused.code, out.exists()) == (2, False)
    assert "--num-target-layers 1: the drafter was trained for N = 0." in refused.error
