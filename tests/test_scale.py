"""The benchmark of target sizes: what it measures and prints, with tiny shapes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from moaspec.backends.cuda_graphs import PassGraphs
from moaspec.target.registry import skeleton_of
from recorder import recorders

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import scale


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
    shapes = {
        "tied": scale.llama(64, 96, 2, heads=4, kv_heads=2, vocab=256),
        "wide": scale.llama(128, 160, 1, heads=2, kv_heads=1, vocab=256),
    }
    monkeypatch.setattr(scale, "SHAPES", shapes)
    monkeypatch.setattr(scale, "SIZES", {"wide": {"parameters": 500_000}})
    monkeypatch.setattr(scale, "WIDTHS", (1, 4))
    files = [tmp_path / "figures.json", tmp_path / "plot.svg"]
    options = ["--threads=1", f"--draft-vocab={draft_vocab}", "--drafts", "chain:2", "tree:2x3x6"]
    options += ["--dtype=float32", f"--json={files[0]}", f"--plot={files[1]}"]
    monkeypatch.setattr(sys, "argv", ["scale.py", *options])
    scale.main()
    printed = capsys.readouterr().out
    facts = json.loads(files[0].read_text())
    assert json.loads(printed.splitlines()[-1]) == facts
    assert "chain:2 draft" in printed
    assert "<svg" in files[1].read_text()
    ways = [True, False] if graphs else [False]
    assert [(one["target"], one["graphs"]) for one in facts["targets"]] == [
        (name, way) for name in shapes for way in ways
    ]
    assert facts["targets"][-1]["drafter"] <= 500_000
    for one in facts["targets"]:
        assert list(one["pass"]) == ["1", "4"]
        assert min(*one["pass"].values(), *one["encode"].values()) > 0
        for drafted in one["drafts"].values():
            assert min(drafted["draft"], drafted["verify"]) > 0
            assert list(drafted["speedup"]) == ["2.0", "3.0", "4.2", "4.8"]


def test_sizes_are_those_of_the_models() -> None:
    sizes = {}
    for name, config in scale.SHAPES.items():
        model = skeleton_of(config, "bfloat16")
        sizes[name] = model.num_parameters() / 1e6
    expected = {"135M": 134.5, "360M": 361.8, "1B": 1235.8, "3B": 3212.7, "8B": 8030.3}
    assert sizes == pytest.approx(expected, abs=0.1)
