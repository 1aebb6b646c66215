"""docs/cli.md is generated from the commands."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_command_reference_is_current(tmp_path: Path) -> None:
    """Run `make docs` when this fails."""
    from typer.cli import app

    fresh = tmp_path / "cli.md"
    arguments = ["moaspec.cli.main", "utils", "docs", "--name", "moaspec"]
    result = CliRunner().invoke(
        app, [*arguments, "--title", "Command line", "--output", str(fresh)]
    )
    assert result.exit_code == 0
    assert fresh.read_text() == DOCS.read_text()
