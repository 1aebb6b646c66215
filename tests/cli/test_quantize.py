"""`--quantize` of the commands that load a target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commands import Cli, load_targets_by
from moaspec_core.errors import InputError


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "Why?"),
        ("chat",),
        ("serve",),
        ("target-server",),
        ("calibrate",),
        ("check",),
        ("eval", "--methods", "plain"),
        ("eval", "--methods", "plain", "--cost"),
    ],
)
def test_it_reaches_the_target(
    command: tuple[str, ...], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("moaspec_core.cli.terminal.status.require", lambda *_: None)

    def load(*_: Any, **options: Any) -> None:
        seen.append(options.get("quantize"))
        raise InputError("enough seen")

    load_targets_by(monkeypatch, load)
    assert cli(*command, "--quantize", "int4").code == 2
    assert cli(*command).code == 2
    assert cli(*command, "--quantize", "inputs").code == 2
    assert seen == ["int4", None, "inputs"]


def test_it_reaches_the_target_that_writes_data(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def load(*_: Any, **options: Any) -> None:
        seen.append(options["quantize"])
        raise InputError("enough seen")

    load_targets_by(monkeypatch, load)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "Why?"}]}\n')
    asked = ("regenerate", str(prompts), "--out", str(tmp_path / "out"), "--quantize", "inputs")
    out = cli("data", *asked)
    assert (out.code, seen) == (2, ["inputs"]), out.err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("generate", "Why?", "--quantize", "int3"), "is not one of 'int8', 'int4', 'inputs'"),
        (("chat", "--url", "http://127.0.0.1:1", "--quantize", "int8"), "they are the server's"),
        (("target-server", "--engine", "vllm", "--quantize", "int8"), "is for --engine torch"),
    ],
)
def test_refused(command: tuple[str, ...], message: str, cli: Cli) -> None:
    output = cli(*command)
    assert output.code == 2
    assert message in output.err


def test_it_is_among_the_settings_that_results_have(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that other weights do not resume them."""
    monkeypatch.setattr("moaspec_core.cli.terminal.status.require", lambda *_: None)

    def load(*_: Any, **__: Any) -> None:
        raise InputError("enough seen")

    load_targets_by(monkeypatch, load)
    cli("eval", "--methods", "plain", "--quantize", "int8", "--out", str(tmp_path))
    settings = json.loads((tmp_path / "settings.json").read_text(encoding="utf-8"))
    assert settings["quantize"] == "int8"
