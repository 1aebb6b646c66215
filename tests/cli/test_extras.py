"""Commands whose optional packages are missing name the extra, in one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from moaspec_core.support import extras
from moaspec_core.support.extras import EXTRAS, install_command

ROOT = Path(__file__).parents[2]

BASE_ONLY = """
import contextlib, io, json, sys

class Finder:
    '''Finds what the finders find, except the modules of extras.'''
    def __init__(self, finders, hidden):
        self.finders, self.hidden = finders, hidden
    def find_spec(self, name, path=None, target=None):
        if any(name == one or name.startswith(one + ".") for one in self.hidden):
            return None
        found = (finder.find_spec(name, path, target) for finder in self.finders)
        return next((spec for spec in found if spec is not None), None)
    def find_distributions(self, *context):
        for finder in self.finders:
            yield from getattr(finder, "find_distributions", lambda *_: ())(*context)

hidden, commands = json.loads(sys.argv[1])
sys.meta_path[:] = [Finder(list(sys.meta_path), hidden)]
from moaspec_core.cli import main
found = []
for command in commands:
    sys.argv, error, code = ["moaspec", *command], io.StringIO(), 0
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
        try:
            main.run()
        except SystemExit as end:
            code = end.code or 0
    found.append([code, error.getvalue()])
print(json.dumps(found))
"""

NEEDING = {
    "chat --url http://127.0.0.1:9": "serve",
    "checkpoint export-device smollm2-135m smollm2-135m out": "remote",
    "checkpoint export-device smollm2-135m smollm2-135m out --format onnx": "remote,device-onnx",
    "data overlap hub:a/b --against rows.jsonl": "hub",
    "data regenerate hub:a/b --out out.jsonl": "hub",
    "edge": "serve,device,private",
    "edge-bench": "remote",
    "eval --suite hub:a/b": "hub",
    "eval --suite humaneval.jsonl --cut 2 --accuracy": "accuracy",
    "generate Hi --adapter lora": "adapter",
    "generate Hi --quantize int8": "quantize",
    "remote Hi": "device,private",
    "remote Hi --no-recognise": "device",
    "serve": "serve",
    "target-server": "remote",
    "target-server --engine vllm": "remote",
    "train config.yaml data=[hub:a/b]": "hub",
}
"""Commands, and the extras that their message tells to install."""

NOT_NEEDING = ("--version", "--help", "models", "train --init", "data overlap rows.jsonl --help")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit codes and error output where the base package alone is installed, which needs httpx."""
    directory = tmp_path_factory.mktemp("base")
    (directory / "config.yaml").write_text("target: smollm2-135m\ndata: [rows.jsonl]\noutput: runs")
    (directory / "rows.jsonl").write_text('{"prompt": "Hi", "response": "Hello"}\n')
    (directory / "humaneval.jsonl").write_text('{"category": "a", "turns": ["Write f."]}\n')
    hidden = [module for modules in EXTRAS.values() for module in modules if module != "httpx"]
    commands = [*NEEDING, *NOT_NEEDING]
    request = json.dumps([hidden, [command.split() for command in commands]])
    done = subprocess.run(
        [sys.executable, "-c", BASE_ONLY, request],
        capture_output=True,
        text=True,
        cwd=directory,
        env={**os.environ, "MOASPEC_CACHE": str(directory / "cache")},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    made = [one.name for one in (directory / "cache").glob("*")]
    assert made in ([], ["locks"])  # nothing was loaded before
    return {command: tuple(one) for command, one in zip(commands, results, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("command", NEEDING)
def test_a_command_names_its_extra(command: str, found: dict[str, tuple[int, str]]) -> None:
    code, error = found[command]
    assert code == 2, error
    _, _, message = error.partition("Error: ")
    assert message.count("\n") == 1
    assert message.endswith(f" install -e '{ROOT}[{NEEDING[command]}]'.\n")


@pytest.mark.slow
@pytest.mark.parametrize("command", NOT_NEEDING)
def test_other_commands_need_none(command: str, found: dict[str, tuple[int, str]]) -> None:
    code, error = found[command]
    assert code == 0, error


def test_every_extra_is_known() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS) == set(project["optional-dependencies"]) - {"dev", "docs"}


def test_the_checkout_of_the_device_package_is_named() -> None:
    assert install_command("serve", package="moaspec-device").endswith(
        f" install -e '{ROOT}/packages/device-python[serve]'"
    )


def _write_distribution(directory: Path, origin: dict[str, object] | None) -> None:
    """What an installer leaves: metadata, and where the package came from (PEP 610)."""
    (directory / "METADATA").write_text("Metadata-Version: 2.1\nName: moaspec\nVersion: 1\n")
    if origin is not None:
        (directory / "direct_url.json").write_text(json.dumps(origin))


@pytest.mark.parametrize(
    ("origin", "asked"),
    [
        (None, "moaspec[serve]"),
        (
            {"url": "file:///w/moaspec-1-py3-none-any.whl", "archive_info": {}},
            "moaspec[serve] @ file:///w/moaspec-1-py3-none-any.whl",
        ),
        ({"url": "file:///clone", "dir_info": {}}, "moaspec[serve] @ file:///clone"),
        (
            {"url": "https://host/a.git", "vcs_info": {"vcs": "git", "commit_id": "1"}},
            "moaspec[serve] @ git+https://host/a.git",
        ),
    ],
)
def test_an_installed_package_is_asked_for_where_it_came_from(
    origin: dict[str, object] | None, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "moaspec-1.dist-info"
    installed.mkdir()
    _write_distribution(installed, origin)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(extras, "CHECKOUT", tmp_path)
    assert install_command("serve", package="moaspec").endswith(f" install '{asked}'")
    Requirement(asked)


def test_pip_is_the_one_of_this_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install_command().startswith(f"{sys.executable} -m pip install ")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert install_command().startswith("pip install ")


def test_no_message_names_a_package_that_may_not_be_on_an_index() -> None:
    """Messages call `install_command`, which knows where this package came from."""
    fixed = re.compile(r"pip install[^\n]{0,20}moaspec")
    sources = (ROOT / "src/moaspec").rglob("*.py")
    assert [path.name for path in sources if fixed.search(path.read_text("utf-8"))] == []


@pytest.mark.slow
def test_the_server_of_one_machine_needs_its_extra_only() -> None:
    needed = (*EXTRAS["serve"], *EXTRAS["device-onnx"])  # an environment may have these, too
    hidden = {module for modules in EXTRAS.values() for module in modules} - set(needed)
    code = BASE_ONLY.partition("from moaspec_core.cli")[0] + (
        "import moaspec_serve.sources.local_source, moaspec_serve.uvicorn_server"
    )
    request = json.dumps([sorted(hidden), []])
    done = subprocess.run(
        [sys.executable, "-c", code, request], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
