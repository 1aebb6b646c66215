"""`moaspec check` of GGUF files: llama.cpp reads them, too."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import gguf_models
from commands import Cli
from moaspec.backends import load
from moaspec.cli.reader_check import check_reader
from moaspec.evaluate.correctness import llama_cpp
from moaspec.target.weights import gguf_config
from moaspec_core.cli.options import LoadOptions

OPTIONS = ("--max-new-tokens", "2", "--limit", "1", "--dtype", "float32")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOASPEC_CACHE", str(tmp_path / "cache"))
    made = gguf_models.model("llama", max_position_embeddings=2048)
    return gguf_models.write(tmp_path / "model.gguf", "llama", made)


def test_without_llama_cpp_nothing_is_loaded(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(llama_cpp.importlib.util, "find_spec", lambda _: None)  # type: ignore[attr-defined]
    monkeypatch.setattr(load, "load_target", None)
    found = check_reader(LoadOptions(model=str(file)), [1, 2, 3], quiet=False)
    assert found is not None
    assert found.verdict == "unknown"
    assert "not installed (pip install xllamacpp)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_right_reading_passes(file: Path, cli: Cli) -> None:
    pytest.importorskip("xllamacpp")
    output = cli("check", "--model", str(file), *OPTIONS)
    assert output.code == 0
    assert "The GGUF is read as llama.cpp reads it: 50 tokens" in output.words


@pytest.mark.slow
def test_a_wrong_reading_fails(file: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """All texts agree with transformers, which computes from the same wrong weights."""
    pytest.importorskip("xllamacpp")
    known = gguf_config.ARCHITECTURES["llama"]
    wrong = {"llama": dataclasses.replace(known, pairs=False)}
    monkeypatch.setattr(gguf_config, "ARCHITECTURES", wrong)
    output = cli("check", "--model", str(file), *OPTIONS)
    assert output.code == 1
    assert "every token is the target's choice" in output.words
    assert "Wrong: the reader of GGUF files" in output.words
    data = json.loads(cli("check", "--model", str(file), *OPTIONS, "--json").out)
    assert data["right"] is False
    assert data["reader"]["verdict"] == "different"
