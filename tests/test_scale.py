"""The benchmark of target sizes: what it measures and prints, with tiny shapes."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from moaspec.backends.cuda_graphs import PassGraphs
from moaspec.drafting.kv_cache import KVCache
from moaspec.target.registry import skeleton_of
from moaspec.target.target import Target
from recorder import recorders

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import scale

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
SHAPES = scale.SHAPES
FAMILY = {
    "tied": scale.llama(64, 96, 2, heads=4, kv_heads=2, vocab=256),
    "wide": scale.llama(128, 160, 3, heads=2, kv_heads=1, vocab=256),
}


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SHAPES": FAMILY,
        "SIZES": {"wide": {"parameters": 500_000}},
        "WIDTHS": (1, 4),
        "ENCODED": (1, 4),
    }.items():
        monkeypatch.setattr(scale, name, value)


def _run(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["scale.py", "--threads=1", "--seconds=0", *options])
    scale.main()


@pytest.mark.slow
@pytest.mark.parametrize(("draft_vocab", "graphs"), [(0, False), (64, True)])
def test_tables_and_figures(
    draft_vocab: int,
    graphs: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    if graphs:
        monkeypatch.setattr(PassGraphs, "of", lambda _: recorders()[0])
    files = [tmp_path / "figures.json", tmp_path / "plot.svg"]
    options = [f"--draft-vocab={draft_vocab}", "--drafts", "chain:2", "tree:2x3x6"]
    options += ["--dtype=float32", f"--json={files[0]}", f"--plot={files[1]}"]
    _run(monkeypatch, *options)
    printed = capsys.readouterr().out
    data = json.loads(files[0].read_text())
    assert json.loads(printed.splitlines()[-1]) == data
    assert "draft, chain:2" in printed
    assert "<svg" in files[1].read_text()
    ways = [True, False] if graphs else [False]
    assert [(one["target"], one["graphs"]) for one in data["targets"]] == [
        (name, way) for name in FAMILY for way in ways
    ]
    assert data["targets"][-1]["drafter"] <= 500_000
    for one in data["targets"]:
        assert list(one["pass"]) == list(one["encode"]) == ["1", "4"]
        least = [part["low"] for part in (*one["pass"].values(), *one["encode"].values())]
        assert min(*least, one["plain"]["low"]) > 0
        for drafted in one["drafts"].values():
            assert drafted["round"]["low"] > drafted["draft"]["low"] > 0
            assert list(drafted["speedup"]) == ["2.0", "3.0", "4.2", "4.8"]


@pytest.mark.slow
def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "figures.json"
    options = ["--dtype=float32", "--drafts=chain:2", f"--json={file}", "--shapes"]
    _run(monkeypatch, *options, "tied")
    (first,) = json.loads(file.read_text())["targets"]
    _run(monkeypatch, *options, "tied", "wide")
    again, other = json.loads(file.read_text())["targets"]
    assert again == first
    assert other["target"] == "wide"
    with pytest.raises(SystemExit, match="other settings"):
        _run(monkeypatch, "--layers-gb=1", *options, "tied")


@pytest.mark.kernels
@pytest.mark.parametrize("quantize", ["none", pytest.param("int4", marks=needs_torchao)])
def test_layers_share_weights(quantize: str) -> None:
    two_gb = 2 * 2 * scale.layer_size(FAMILY["wide"]) / 1e9
    made, shared = (_target(quantize, "bfloat16", gb) for gb in (0, two_gb))
    assert made.num_layers == shared.num_layers == 3
    assert scale.pass_bytes(made) == scale.pass_bytes(shared)
    first, second, third = (one.mlp.down_proj.weight for one in shared.model.model.layers)
    assert torch.equal(first, third)
    assert not torch.equal(first, second)
    assert scale.whole_pass(shared, KVCache(shared), 3)()


def test_a_target_of_shared_layers_is_a_model_of_transformers() -> None:
    target, ids_1T = _target("none", "float32", 1e-9), torch.arange(5)[None]
    hidden_1TE = target.capture(ids_1T, torch.ones_like(ids_1T)).hidden_BTE
    with torch.no_grad():
        expected_1TE = target.model.model(ids_1T, use_cache=False).last_hidden_state
    torch.testing.assert_close(hidden_1TE, expected_1TE)  # float32's own tolerance


def _target(quantize: str, dtype: str, layers_gb: float) -> Target:
    args = scale.options().parse_args([f"--dtype={dtype}", f"--layers-gb={layers_gb}"])
    return scale.random_target("wide", quantize, args)


def test_sizes_are_those_of_the_models() -> None:
    sizes = {}
    for name, config in SHAPES.items():
        model = skeleton_of(config, "bfloat16")
        sizes[name] = model.num_parameters() / 1e6
    expected = {"135M": 134.5, "360M": 361.8, "1B": 1235.8, "3B": 3212.7, "8B": 8030.3}
    assert sizes == pytest.approx(expected, abs=0.1)
