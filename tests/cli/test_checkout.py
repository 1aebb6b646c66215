"""Commands, and parts of commands, that only a checkout has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import moaspec
from commands import Cli
from moaspec_core.cli.checkout import add_tool_command, checkout_option
from moaspec_core.errors import InputError


def _app() -> typer.Typer:
    app = typer.Typer()
    app.command("models")(lambda: None)  # an app with one command has no command names
    add_tool_command(app, "edge_bench.command:edge_bench", "moaspec edge-bench")
    return app


@pytest.mark.parametrize("arguments", [[], ["--link", "none", "--json"]])
def test_an_installed_package_says_that_it_needs_a_checkout(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moaspec_core.cli.checkout.TOOLS", tmp_path)
    found = CliRunner().invoke(_app(), ["edge-bench", *arguments])
    assert isinstance(found.exception, InputError)
    assert "`moaspec edge-bench` runs only in a checkout" in str(found.exception)


def test_an_installed_package_hides_options_of_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not checkout_option("--cost", "Costs.").hidden
    monkeypatch.setattr("moaspec_core.cli.checkout.TOOLS", tmp_path)
    assert checkout_option("--cost", "Costs.").hidden


def test_an_installed_package_shows_only_commands_that_it_has(tmp_path: Path) -> None:
    """A copy of the packages without the files around them."""
    site = tmp_path / "lib" / "site"
    for sources in Path(moaspec.__file__).parents[3].glob("*/src"):
        shutil.copytree(sources, site, dirs_exist_ok=True)
    code = """
from typer.testing import CliRunner
from moaspec_core.cli.main import app
import moaspec
print(moaspec.__file__)
for words in ([], ["data"], ["eval"]):
    print(CliRunner().invoke(app, [*words, "--help"]).output)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(str(tmp_path))
    assert all(one in done.stdout for one in ("stats", "overlap", "compare"))
    assert not any(one in done.stdout for one in ("checkout", "edge-bench", "--cost", "--cut"))


def test_a_checkout_has_the_command() -> None:
    found = CliRunner().invoke(_app(), ["edge-bench", "--help"])
    assert found.exit_code == 0
    assert "--server-speed" in found.output


@pytest.mark.parametrize("option", [("--cost",), ("--cut", "3")])
def test_eval_names_the_option_that_needs_a_checkout(
    option: tuple[str, ...], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: str, command: str) -> None:
        raise InputError(f"{command} needs a checkout.")

    monkeypatch.setattr("moaspec.cli.evaluate.import_tool", refuse)
    output = cli("eval", *option)
    assert output.code == 2
    assert f"moaspec eval {option[0]} needs a checkout" in output.err
