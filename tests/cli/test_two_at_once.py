"""Two commands with one output: the second is refused before it loads anything."""

from pathlib import Path

import pytest

from commands import Cli
from free_port import free_port
from moaspec_core.support.extras import MODULES
from moaspec_core.support.locks import writing

pytest.importorskip("fcntl", reason="this system has no flock")
COMMANDS = {
    "convert": "checkpoint convert smollm2-135m OUT --to moaspec",
    "torch bundle": "checkpoint export-device smollm2-135m smollm2-135m OUT",
    "onnx bundle": "checkpoint export-device smollm2-135m smollm2-135m OUT --format onnx",
    "synth": "data synth --out OUT",
    "regenerate": "data regenerate missing.jsonl --out OUT",
    "eval": "eval --out OUT",
    "train": "train CONFIG",
    "serve": "serve --port PORT --learn OUT",
    "target-server": "target-server --port 0 --learn OUT",
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
def test_the_second_is_refused(
    command: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODULES, "moaspec-edge[export]", ())
    data, config, out = tmp_path / "data.jsonl", tmp_path / "config.yaml", tmp_path / "out"
    data.write_text("{}\n")
    config.write_text(f"target: smollm2-135m\ndata: ['{data}']\noutput: {out}\n")
    named = {"OUT": str(out), "CONFIG": str(config), "PORT": str(free_port())}
    with writing(out):
        output = cli(*(named.get(one, one) for one in command.split()))
    assert (output.code, out.exists()) == (2, False)
    assert f"Another process is writing {out}" in output.error
