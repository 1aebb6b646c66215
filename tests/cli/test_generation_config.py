"""`--generation-config`: what a model's own file asks for, in the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

import tiny
from commands import Cli

# Lists of EOS ids and penalties are the likeliest surprises.
DEFAULTS: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 3,
    "eos_token_id": list(range(0, 64, 9)),
    "min_new_tokens": 4,
    "suppress_tokens": [1, 2, 3],
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.8,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model with surprising defaults, as people download it."""
    model = tiny.model("llama")
    model.generation_config = GenerationConfig(**DEFAULTS)
    model.save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "suite.jsonl").write_text(json.dumps({"turns": ["w5 w9 w2"]}))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("command", ["check", "eval"])
def test_commands_are_right_and_say_what_holds(command: str, directory: Path, cli: Cli) -> None:
    options = ["--model", str(directory / "model"), "--suite", str(directory / "suite.jsonl")]
    options += ["--max-new-tokens", "8"]
    options += ["--methods", "hf,plain"] if command == "eval" else []
    output = cli(command, *options)
    assert output.code == 0
    assert "repetition_penalty 1.3" in output.err
    assert "temperature 0.7" in output.err
    output = cli(command, *options, "--generation-config", "none")
    assert output.code == 0
    assert "repetition_penalty" not in output.err


def test_commands_sample_where_the_model_does(directory: Path, cli: Cli) -> None:
    options = ["generate", "w5 w9", "--model", str(directory / "model"), "--json"]
    options += ["--max-new-tokens", "8", "--dtype", "float32"]
    seeds = []
    for more in ([], ["--temperature", "0"], ["--generation-config", "none"]):
        seeds.append(json.loads(cli(*options, *more).out)["seed"])
    assert isinstance(seeds[0], int)
    assert seeds[1:] == [None, None]
