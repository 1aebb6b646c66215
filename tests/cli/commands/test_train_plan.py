"""`moaspec train --dry-run`, `data stats` and `data overlap` load no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

import chat_tokenizers
from commands import Cli, complaints
from moaspec_core.cli.terminal import console

ROWS = [{"prompt_ids": [20], "response_ids": [21, 22, 23]}] * 3


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A target whose weights cannot be loaded."""
    target = chat_tokenizers.target()
    directory = tmp_path / "model"
    target.model.save_pretrained(directory)
    tokenizer: Any = target.tokenizer
    tokenizer.save_pretrained(directory)
    for file in directory.glob("*.safetensors"):
        file.unlink()

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", refuse)
    monkeypatch.setattr("moaspec.backends.load.load_target", refuse)
    return str(directory)


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


@pytest.mark.parametrize("with_data", [True, False])
def test_a_plan(
    with_data: bool,
    cli: Cli,
    model: str,
    data: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(console.out, "width", 80)
    config, output = tmp_path / "c.yaml", tmp_path / "run"
    sources = f"[{data}]" if with_data else "[]"
    config.write_text(f"target: {model}\ndata: {sources}\noutput: {output}\nheld_out: 1\n")
    done = cli("train", str(config), "--dry-run")
    assert (done.code, complaints(done.err)) == (0, "")
    assert ("12 tokens" in done.out) == with_data
    assert max(map(len, done.out.splitlines())) <= 80
    assert not output.exists()


@pytest.mark.parametrize("dry", [("--dry-run",), ()])
def test_rounded_weights_that_cannot_be_loaded_are_refused(
    dry: tuple[str, ...], cli: Cli, model: str, data: str, tmp_path: Path
) -> None:
    path, config = Path(model) / "config.json", tmp_path / "c.yaml"
    rounded = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    path.write_text(json.dumps(json.loads(path.read_text()) | rounded))
    config.write_text(f"target: {model}\ndata: [{data}]\noutput: {tmp_path / 'run'}\nheld_out: 1\n")
    done = cli("train", str(config), *dry)
    assert done.code == 2
    assert "is quantised by gptq" in done.error


@pytest.mark.parametrize("dry", [("--dry-run",), ()])
def test_what_cannot_be_trained_is_refused_before_weights_are_loaded(
    dry: tuple[str, ...], cli: Cli, model: str, data: str, tmp_path: Path
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        f"target: {model}\ndata: [{data}]\noutput: {tmp_path / 'run'}\nsizes: {{lsa_heads: 7}}\n"
    )
    done = cli("train", str(config), *dry)
    assert done.code == 2
    assert "does not divide" in done.error


@pytest.mark.parametrize("dry", [("--dry-run",), ()])
def test_variables_of_a_launcher_that_cannot_be(
    dry: tuple[str, ...],
    cli: Cli,
    model: str,
    data: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "abc")
    config = tmp_path / "c.yaml"
    config.write_text(f"target: {model}\ndata: [{data}]\noutput: {tmp_path / 'run'}\n")
    done = cli("train", str(config), *dry)
    assert done.code == 2
    assert "$WORLD_SIZE" in done.error


def test_a_launcher_that_does_not_say_where(
    cli: Cli, model: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = tmp_path / "c.yaml"
    config.write_text(f"target: {model}\ndata: [{data}]\noutput: {tmp_path / 'run'}\nheld_out: 1\n")
    done = cli("train", str(config))
    assert done.code == 2
    assert "$MASTER_ADDR" in done.error


@pytest.mark.parametrize(
    ("setting", "said"),
    [("prompts=[{data}]", "answered with --continuous"), ("quantize=inputs", "is for writing")],
)
def test_settings_of_writing_go_with_continuous(
    setting: str, said: str, cli: Cli, model: str, data: str, tmp_path: Path
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"target: {model}\ndata: [{data}]\noutput: {tmp_path / 'run'}\n")
    refused = cli("train", str(config), setting.format(data=data))
    assert refused.code == 2
    assert said in refused.error


def test_no_data(cli: Cli, model: str, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"target: {model}\ndata: []\noutput: {tmp_path / 'run'}\n")
    done = cli("train", str(config))
    assert done.code == 2
    assert "at least one file" in done.error


def test_data_commands(cli: Cli, model: str, data: str, tmp_path: Path) -> None:
    done = cli("data", "stats", data, "--model", model)
    assert done.code == 0
    assert "12 tokens" in done.out
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "w50 w51"}\n')
    assert cli("data", "overlap", data, "--against", str(prompts), "--model", model).code == 0
