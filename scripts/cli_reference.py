"""Print docs/cli.md, made from the help of all commands."""

from __future__ import annotations

import typer
from typer.cli import get_docs_for_click

from moaspec_core.cli.main import app


def reference() -> str:
    """The text of docs/cli.md."""
    command = typer.main.get_command(app)
    context = typer.Context(command)
    return get_docs_for_click(
        obj=command, ctx=context, name="moaspec", title="Command line"
    ).strip()


if __name__ == "__main__":
    print(reference())
