"""The benchmark of training on GPUs runs here too, with tiny shapes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import scale
import training_shapes

SETTINGS = (
    *("target_dtype=float32", "mixed_precision=no", "batch_tokens=64", "max_length=32"),
    *("warmup_steps=1", "sizes.parameters=0", "sizes.lsa_heads=2", "sizes.draft_vocab=32"),
)


def test_speeds_and_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = scale.llama(32, 48, 2, heads=2, kv_heads=1, vocab=64)
    monkeypatch.setitem(scale.SHAPES, "8B", tiny)
    options = ["--device=cpu", "--gpu=h100", "--steps=2", "--texts=8"]
    monkeypatch.setattr(sys, "argv", ["training_shapes.py", *options, *SETTINGS])
    training_shapes.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    parts = {"target", "LSA", "SA + CA", "head", "head and loss", "backward", "optimiser"}
    assert found["seconds by part"].keys() == parts
    assert found["tokens with loss/s"] > 0
    assert 0 < found["share of operations"] < 1
    assert sum(found["seconds by part"].values()) > 0
