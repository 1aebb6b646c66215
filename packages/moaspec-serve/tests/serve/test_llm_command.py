"""The `llm` command (https://llm.datasette.io), unchanged, with either endpoint."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serving import LONGEST, MODEL, Served, own_text

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["kind", "age"],
    "additionalProperties": False,
}
TOOL = "def noon():\n    'What time it is.'\n    return '12:00'"
SAMPLED = ("-o", "temperature", "0.9", "-o", "seed", "5")


def command() -> str:
    """The command `llm`: $MOASPEC_LLM, beside this Python, or on the path."""
    beside = shutil.which("llm", path=str(Path(sys.executable).parent))
    found = os.environ.get("MOASPEC_LLM") or beside or shutil.which("llm")
    if not found:
        pytest.skip("there is no llm command (pip install llm, or set MOASPEC_LLM)")
    return found


class Llm:
    """The command with a directory of its own, which knows one more model."""

    def __init__(self, directory: Path, served: Served) -> None:
        self._command, self._directory = command(), directory
        known: dict[str, Any] = {"model_id": "moaspec", "model_name": MODEL, "api_base": served.api}
        known |= {"supports_tools": True, "supports_schema": True}
        # JSON is YAML.
        (directory / "extra-openai-models.yaml").write_text(json.dumps([known]))

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        asked = ["-m", "moaspec", "--key", "none", "-o", "max_tokens", str(LONGEST), *arguments]
        # Plugins that happen to be installed are none of this test's business.
        environment = {"LLM_USER_PATH": str(self._directory), "LLM_LOAD_PLUGINS": ""}
        return subprocess.run(
            [self._command, *asked],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            check=False,
        )

    def says(self, *arguments: str) -> str:
        """What the model says, without the line's end that `llm` adds."""
        done = self(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.removesuffix("\n")


@pytest.fixture
def llm(tmp_path: Path, endpoint: Served) -> Llm:
    return Llm(tmp_path, endpoint)


def lines(text: str) -> str:
    """Text as a program sees it that reads another's output: with one kind of line end."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


@pytest.mark.slow
def test_answers_are_the_targets_own(llm: Llm) -> None:
    whole = own_text("hello", temperature=0.9, seed=5)
    assert llm.says("hello", *SAMPLED) == lines(whole)
    assert llm.says("hello", *SAMPLED, "--no-stream") == lines(whole)
    stop = whole[5:8]
    assert llm.says("hello", *SAMPLED, "-o", "stop", stop) == lines(whole[: whole.find(stop)])


@pytest.mark.slow
def test_schemas_tools_and_errors(llm: Llm) -> None:
    asked = ("a pet", "--schema", json.dumps(SCHEMA), "-o", "max_tokens", "60", *SAMPLED)
    for how in ((), ("--no-stream",)):
        value = json.loads(llm.says(*asked, *how))
        assert value["kind"] in ("cat", "dog")
        assert 0 <= value["age"] <= 9
    llm.says("what time is it?", "--functions", TOOL, *SAMPLED)
    refused = llm("x" * 5000)
    assert refused.returncode == 1
    assert "context" in refused.stderr
    assert "Traceback" not in refused.stderr
