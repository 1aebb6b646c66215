"""What commands say on standard error where it is no terminal."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import chat_tokenizers
from commands import Cli
from moaspec.backends import linear_backends
from moaspec.backends.cpu import build
from moaspec_core.cli.terminal.status import measuring, status

AT_TORCH = """
import contextlib, importlib.util, io, json, sys
from moaspec_core.cli.entry import run
class Torch:
    def find_spec(self, name, *_):
        return importlib.util.spec_from_loader(name, self) if name == "torch" else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        raise SystemExit(7)
sys.meta_path.insert(0, Torch())
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["moaspec", *arguments]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            run()
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, said.getvalue()]))
"""
LOADING = {
    "calibrate": "smollm2-135m",
    "chat": "smollm2-135m",
    "check": "smollm2-135m",
    "checkpoint convert smollm2-135m out --to moaspec": "smollm2-135m",
    "checkpoint export-device smollm2-135m smollm2-135m out": "smollm2-135m",
    "checkpoint push . a/b": ".",
    "data regenerate rows.jsonl --out out.jsonl": "smollm2-135m",
    "data stats rows.jsonl": "smollm2-135m",
    "data synth --out out.jsonl": "smollm2-135m",
    "edge --port 1": "smollm2-135m",
    "eval": "smollm2-135m",
    "generate Hi": "smollm2-135m",
    "info smollm2-135m": "smollm2-135m",
    "remote Hi": "smollm2-135m",
    "serve": "smollm2-135m",
    "target-server": "smollm2-135m",
    "train config.yaml": "config.yaml",
    "vllm-check": "smollm2-135m",
    "vllm-config": "smollm2-135m",
}
"""Commands that load libraries for seconds, and what they say they load."""


@pytest.mark.slow
def test_a_pipe_is_told_what_loads_before_the_libraries_are_imported(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Hi", "response": "Hello"}\n')
    (tmp_path / "config.yaml").write_text("target: smollm2-135m\n")
    done = subprocess.run(
        [sys.executable, "-c", AT_TORCH, json.dumps([command.split() for command in LOADING])],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    found = dict(zip(LOADING, map(json.loads, done.stdout.splitlines()), strict=True))
    # `data regenerate` reads its rows first.
    told = {
        command: [code, text.removeprefix("Reading rows\n")]
        for command, (code, text) in found.items()
    }
    assert told == {command: [7, f"Loading {what}\n"] for command, what in LOADING.items()}


def test_what_is_done_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    with status("Reading [x]"):
        assert capsys.readouterr().err == "Reading [x]\n"
    with measuring() as advance:
        assert capsys.readouterr().err == ""
        advance("passes")
        advance("drafts")
    assert capsys.readouterr().err == "Measuring this machine, once\n"


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A CPU that needs kernels for bf16, and no compiler for them."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv(build.SWITCH, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(build, "supported", lambda: ["avx2"])
    monkeypatch.setattr(linear_backends, "_bf16_instructions", lambda: False)
    build._loaded.cache_clear()
    yield
    build._loaded.cache_clear()


@pytest.fixture
def model(tmp_path: Path) -> str:
    target = chat_tokenizers.target()
    tokenizer: Any = target.tokenizer
    for part in (target.model, tokenizer):
        part.save_pretrained(tmp_path / "target")
    return str(tmp_path / "target")


@pytest.mark.slow
@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize(
    "command",
    [
        "calibrate",
        "chat",
        "check --suite prompts.jsonl --limit 1 --max-new-tokens 1",
        "data regenerate prompts.jsonl --out out.jsonl --max-new-tokens 1",
        "data synth --out out.jsonl --num 1 --for 0.01s",
        "eval --suite prompts.jsonl --methods plain --max-new-tokens 1",
        "generate Hi --max-new-tokens 1",
    ],
)
def test_without_a_compiler_the_user_learns_what_that_costs(
    command: str, model: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n/exit\n"))
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["Hi"], "prompt": "Hi"}\n')
    output = cli(*command.split(), "--model", model)
    (told,) = [line for line in output.err.splitlines() if "C++ compiler" in line]
    assert told.startswith("Decoding takes two to three times as long without moaspec's kernels: ")
    assert "apt install g++" in told
