"""Wrong rotary embeddings in a config are refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

import moaspec
import tiny
from moaspec.target.target import Target
from moaspec_core.errors import UnknownModelError

LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
WRONG: list[tuple[Any, str]] = [
    *(
        ({"rope_type": kind, "factor": value}, r"\.factor must be a positive number, and it is ")
        for kind in ("linear", "dynamic", "yarn", "proportional")
        for value in ("4.0", "four", True, [4], 0, -2.0, math.nan, math.inf)
    ),
    *(
        ({"rope_type": kind}, f"factor is missing, which the rope_type '{kind}' needs")
        for kind in ("linear", "dynamic", "yarn", "llama3")
    ),
    ({**LLAMA3, "low_freq_factor": None}, "low_freq_factor is missing"),
    ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor must be greater"),
    ({**LLAMA3, "original_max_position_embeddings": "32"}, "original_max_position_embeddings must"),
    ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}, "it is 0"),
    ({"rope_type": "yarn", "factor": 2.0, "beta_fast": "x"}, "beta_fast must be"),
    ({"rope_type": "yarn", "factor": 2.0, "attention_factor": "x"}, "attention_factor must be"),
    ({"rope_type": "longrope"}, "short_factor is missing"),
    ({**LONG, "long_factor": [1.0] * 3}, "long_factor must have 4 numbers.* it has 3"),
    ({**LONG, "short_factor": ["1.0"] * 4}, "short_factor must be a list of positive numbers"),
    ({**LONG, "short_factor": "x"}, "short_factor must be a list of positive numbers"),
    ({"rope_type": "ntk-by-parts", "factor": 2.0}, "rope_type must be one of default, .*ntk-by"),
    ({"rope_type": 3}, "rope_type must be one of"),
    ({"type": "su", **LONG, "rope_type": None}, "rope_type must be one of"),
    ({"type": "mrope", "mrope_section": [1]}, "rope_type must be one of .*mrope"),
    ({"rope_type": "default", "rope_theta": "1e4"}, "rope_theta must be a positive number"),
    ({"rope_type": "default", "rope_theta": None}, "rope_theta must be a positive number"),
    ("yarn", "must be an object, and it is 'yarn'"),
    ([1], "must be an object"),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tiny.model().save_pretrained(path)
    return path


def load(directory: Path, **changes: Any) -> Target:
    saved = directory / "saved.json"
    if not saved.exists():
        saved.write_text((directory / "config.json").read_text())
    config = json.loads(saved.read_text())
    del config["rope_parameters"]
    (directory / "config.json").write_text(json.dumps(config | changes))
    return moaspec.load_target(directory, dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(("given", "message"), WRONG)
def test_the_field_is_named(directory: Path, given: Any, message: str, key: str) -> None:
    with pytest.raises(UnknownModelError, match=rf"in its config.json .*{key}.*{message}"):
        load(directory, **{key: given})


@pytest.mark.parametrize("length", [None, "2048", 2048.0, -1, 0])
def test_a_context_that_is_no_length(directory: Path, length: Any) -> None:
    with pytest.raises(UnknownModelError, match="'max_position_embeddings' must be a positive"):
        load(directory, max_position_embeddings=length)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2},
        {"type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": None, "mscale": 1.0},
        LLAMA3,
        {**LONG, "factor": 4.0},
        {"rope_type": "proportional"},
    ],
)
def test_right_ones_are_loaded(directory: Path, given: dict[str, Any]) -> None:
    for theta in ({}, {"rope_theta": 5000}):
        target = load(directory, rope_scaling=given, **theta)
        assert moaspec.generate(target, [1, 2, 3], max_new_tokens=2).token_ids


def test_a_config_in_memory_is_checked_too() -> None:
    model = tiny.model()
    model.config.rope_parameters = {"rope_type": "linear", "factor": "2", "rope_theta": 1e4}
    with pytest.raises(UnknownModelError, match=r"rope_parameters\.factor must be"):
        Target(model, None, name="in memory")
    assert LlamaConfig().max_position_embeddings == 2048  # where a config says nothing
