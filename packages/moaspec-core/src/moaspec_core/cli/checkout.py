"""Commands, and parts of commands, whose code is in tools/: only a checkout has them."""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from moaspec_core.errors import InputError
from moaspec_core.support.extras import checkout

TOOLS = (checkout() or Path(os.devnull)) / "tools"  # an installed package has none


def import_tool(module: str, command: str) -> Any:
    """Import a module of tools/; `command` needs it.

    Raises:
        InputError: this is an installed package, which has no tools.
    """
    if not has_tool(module):
        raise InputError(
            f"`{command}` runs only in a checkout of the repository, because it is not part of the "
            "installed package: clone the repository, run `make install` there, and use its "
            ".venv/bin/moaspec."
        )
    if str(TOOLS) not in sys.path:
        sys.path.append(str(TOOLS))
    return import_module(module)


def add_tool_command(app: typer.Typer, function: str, command: str) -> None:
    """Add a command, which an installed package hides and refuses.

    Args:
        function: `module:function` in tools/.
        command: what the user calls; its last word is the name.
    """
    module, _, attribute = function.partition(":")
    name = command.rpartition(" ")[2]
    if has_tool(module):
        app.command(name)(getattr(import_tool(module, command), attribute))
        return

    @app.command(name, hidden=True, context_settings={"ignore_unknown_options": True})
    def unavailable(arguments: Annotated[list[str] | None, typer.Argument()] = None) -> None:
        """Say that this command needs a checkout."""
        del arguments
        import_tool(module, command)


def checkout_option(flag: str, text: str) -> Any:
    """An option whose code is in tools/; an installed package hides and refuses it."""
    return typer.Option(flag, help=text, hidden=not has_tool("eval_studies.command"))


def has_tool(module: str) -> bool:
    """Whether tools/ has this module: an installed package has none."""
    return (TOOLS / Path(*module.split("."))).with_suffix(".py").is_file()
