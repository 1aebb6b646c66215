"""Where `moaspec edge-bench` comes from, and how it starts its processes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from edge_bench import python_command
from moaspec.cli.commands.edge_bench import add_edge_bench
from moaspec.errors import InputError


def _app(tools: Path | None) -> typer.Typer:
    app = typer.Typer()
    app.command("models")(lambda: None)  # an app with one command has no command names
    if tools is None:
        add_edge_bench(app)
    else:
        add_edge_bench(app, tools)
    return app


@pytest.mark.parametrize("arguments", [[], ["--links", "none", "--json"]])
def test_an_installed_package_says_that_it_needs_a_checkout(
    arguments: list[str], tmp_path: Path
) -> None:
    found = CliRunner().invoke(_app(tmp_path), ["edge-bench", *arguments])
    assert isinstance(found.exception, InputError)
    assert "checkout of the repository" in str(found.exception)


def test_a_checkout_has_the_command() -> None:
    found = CliRunner().invoke(_app(None), ["edge-bench", "--help"])
    assert found.exit_code == 0
    assert "--server-speed" in found.output


def test_a_new_process_finds_the_modules_from_any_directory(tmp_path: Path) -> None:
    done = subprocess.run(python_command("edge_bench.formula"), cwd=tmp_path, check=False)
    assert done.returncode == 0
