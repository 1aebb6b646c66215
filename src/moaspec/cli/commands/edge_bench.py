"""Adds `moaspec edge-bench` in a checkout: its code is in tools/, not in the package."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from moaspec.errors import InputError

TOOLS = Path(__file__).parents[4] / "tools"


def add_edge_bench(app: typer.Typer, tools: Path = TOOLS) -> None:
    """Add the command; in an installed package, a command that says where it runs."""
    if not (tools / "edge_bench" / "command.py").is_file():
        ignore = {"ignore_unknown_options": True}
        app.command("edge-bench", hidden=True, context_settings=ignore)(_unavailable)
        return
    if str(tools) not in sys.path:
        sys.path.append(str(tools))
    from edge_bench.command import edge_bench

    app.command("edge-bench")(edge_bench)


def _unavailable(arguments: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Measure client-server decoding; needs a checkout."""
    del arguments
    raise InputError(
        "`moaspec edge-bench` runs only in a checkout of the repository, because it is not part of "
        "the installed package: clone the repository, run `make install` there, and use its "
        ".venv/bin/moaspec."
    )
