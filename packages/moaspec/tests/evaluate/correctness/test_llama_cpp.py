"""llama.cpp as a second reader of GGUF files, and faults that it must notice."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import gguf_models
import moaspec
from moaspec.evaluate.correctness import llama_cpp
from moaspec.evaluate.correctness.llama_cpp import LENGTH, compare_readers

IDS = [(7 * i * i + 3 * i + 5) % gguf_models.VOCAB for i in range(LENGTH)]
LLAMA3 = {
    "rope_theta": 5e5,
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOASPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A model of four layers in Q8_0, whose positions are scaled."""
    made = gguf_models.model("llama", num_hidden_layers=4)
    fields = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    path = tmp_path / "model.gguf"
    return gguf_models.write(path, "llama", made, fields=fields, quantised=True)


def _read(file: Path) -> Any:
    return moaspec.load_target(file, dtype="float32", packed=False).model  # faults change weights


def test_a_right_reading(file: Path) -> None:
    pytest.importorskip("xllamacpp")
    model = _read(file)
    steps: list[str] = []
    found = compare_readers(model, file, IDS, told=steps.append)
    assert found.verdict == "same"
    assert found.count == 50
    assert steps == [
        "copying the first layers",
        "llama.cpp reads 2 layers",
        *(f"{done} of 50 tokens by llama.cpp" for done in range(1, 51)),
        "the same tokens by transformers",
    ]
    assert model.config.num_hidden_layers == 4
    assert "is read as llama.cpp reads it" in str(found)


def _changed_config(model: Any, **changes: Any) -> Any:
    config = copy.deepcopy(model.config)
    config.update(changes)
    made = AutoModelForCausalLM.from_config(config).eval()
    made.load_state_dict(model.state_dict())
    return made


def _unscaled(model: Any) -> Any:
    return _changed_config(model, rope_parameters={"rope_theta": 1e4, "rope_type": "default"})


def _unpermuted(model: Any) -> Any:
    for layer in model.model.layers:
        weight = layer.self_attn.k_proj.weight
        weight.data = weight.unflatten(0, (2, 2, -1)).transpose(1, 2).flatten(0, 2).data
    return model


def _another_epsilon(model: Any) -> Any:
    return _changed_config(model, rms_norm_eps=1e-3)


def _without_a_norm(model: Any) -> Any:
    model.model.layers[0].input_layernorm.weight.data.fill_(1.0)
    return model


@pytest.mark.parametrize("fault", [_unscaled, _unpermuted, _another_epsilon, _without_a_norm])
def test_a_wrong_reading(fault: Any, file: Path) -> None:
    pytest.importorskip("xllamacpp")
    found = compare_readers(fault(_read(file)), file, IDS)
    assert found.verdict == "different"
    assert "otherwise than llama.cpp" in str(found)


def test_a_forgotten_scaling_of_llama_3(tmp_path: Path) -> None:
    """It turns only the slowest dimensions, by little within a short text."""
    pytest.importorskip("xllamacpp")
    made = gguf_models.model("llama", rope_parameters=LLAMA3, max_position_embeddings=16384)
    factors = {"rope_freqs.weight": [1, 1, 1, 1, 1, 2.5, 32, 32]}
    path = gguf_models.write(tmp_path / "model.gguf", "llama", made, factors=factors)
    model = _read(path)
    assert compare_readers(model, path, IDS).verdict == "same"
    forgotten = {"rope_theta": 5e5, "rope_type": "default"}
    model = _changed_config(model, rope_parameters=forgotten)
    assert compare_readers(model, path, IDS).verdict == "different"


def test_llama_cpp_that_does_not_answer(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xllamacpp")
    model = _read(file)
    monkeypatch.setattr(llama_cpp, "TIMEOUT_S", 0.01)
    found = compare_readers(model, file, IDS)
    assert found.verdict == "unknown"
    assert "did not answer within 0.01 s" in str(found)


def test_a_file_that_llama_cpp_does_not_run(file: Path) -> None:
    pytest.importorskip("xllamacpp")
    model = _read(file)
    gguf_models.write(file, "gpt2", gguf_models.model("llama"))
    found = compare_readers(model, file, IDS)
    assert found.verdict == "unknown"
    assert "does not run this file" in str(found)
