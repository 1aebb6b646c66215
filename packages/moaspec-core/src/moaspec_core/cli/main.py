"""The `moaspec` command: parse, call, print."""

import sys
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer

from moaspec_core import __version__
from moaspec_core.cli.checkout import add_tool_command
from moaspec_core.cli.entry import INTERRUPTED
from moaspec_core.cli.renamed import RenamedOptions
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.interrupts import TERMINATED, TerminatedError, raise_on_sigterm
from moaspec_core.errors import (
    HubError,
    InputError,
    MoaSpecError,
    RemoteError,
    ServerError,
    TrainingError,
    WireError,
)
from moaspec_core.support.causes import first_line
from moaspec_core.support.extras import COMMANDS, MODULES, install_command

FAILURES = (HubError, RemoteError, ServerError, TrainingError, WireError)
"""Errors with exit code 1: they are not caused by bad input."""

GROUP = "moaspec.commands"
"""Entry points that name commands, and groups of them, by what a user types."""


class Commands(RenamedOptions):
    """Tells commands that are not installed, and Ctrl-C where a command does not tell it itself."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is None and cmd_name in COMMANDS:
            brings = COMMANDS[cmd_name]
            raise InputError(
                f"`moaspec {cmd_name}` is a command of {brings}, which is not installed: "
                f"{install_command(brings)}."
            )
        return found

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as reason:
            console.warn("Stopped by Ctrl-C.")
            raise typer.Exit(INTERRUPTED) from reason


app = typer.Typer(
    name="moaspec",
    cls=Commands,
    help="Mixture of Attentions speculative decoding: the target's text, exactly, only sooner.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def show_version(wanted: bool) -> None:
    """Print the version and exit."""
    if wanted:
        console.out.print(f"moaspec {__version__}")
        raise typer.Exit


@app.callback()
def settings(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[  # noqa: ARG001 - its callback does it
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Options of every command."""
    console.DEBUG.set(debug)


def add_commands() -> None:
    """Add the commands of all installed distributions; groups come before commands in them."""
    groups = dict[str, typer.Typer]()
    for point in sorted(entry_points(group=GROUP), key=lambda one: (" " in one.name, one.name)):
        try:
            command = point.load()
        except ImportError as error:  # a device, for one, has no PyTorch
            add_unavailable(point.name, error)
            continue
        group, _, name = point.name.rpartition(" ")
        if isinstance(command, typer.Typer):
            groups[point.name] = command
            app.add_typer(command, name=point.name)
            continue
        parent = groups.get(group) if group else app
        if parent is not None:  # the group's own distribution may be missing
            # `train` takes settings as options too, and refuses what is neither.
            settings = {"ignore_unknown_options": point.name == "train"}
            parent.command(name, context_settings=settings)(command)


def add_unavailable(command: str, error: ImportError) -> None:
    """Add a command that is not shown, and says what it lacks."""
    if " " in command:  # its group says it
        return

    missing = (error.name or "").partition(".")[0]
    brings = "moaspec" if missing in MODULES["moaspec"] else COMMANDS.get(command)
    how = "install its distribution again" if brings is None else install_command(brings)
    told = f"`moaspec {command}` needs packages that are not installed ({missing or error}): {how}."

    @app.command(command, hidden=True, help=told, context_settings={"ignore_unknown_options": True})
    def unavailable(arguments: Annotated[list[str] | None, typer.Argument()] = None) -> None:
        del arguments
        raise InputError(told) from error


add_commands()
try:
    add_tool_command(app, "edge_bench.command:edge_bench", "moaspec edge-bench")
except ImportError as error:
    add_unavailable("edge-bench", error)


def run() -> None:
    """Entry point. Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted, 143 terminated."""
    try:
        with raise_on_sigterm():  # so that temporary files and other processes end, too
            app(prog_name="moaspec")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except TerminatedError:
        sys.exit(TERMINATED)
    except MoaSpecError as error:
        if console.DEBUG.get():
            raise
        console.error(str(error))
        sys.exit(1 if isinstance(error, FAILURES) else 2)
    except OSError as error:  # a full disk, a directory that may not be written to
        if console.DEBUG.get():
            raise
        console.error(f"{error}.")
        sys.exit(1)
    except (MemoryError, RuntimeError) as error:
        if console.DEBUG.get() or not _is_out_of_memory(error):
            raise
        console.error(f"There is not enough memory: {first_line(error).rstrip('.')}.")
        sys.exit(1)


def _is_out_of_memory(error: Exception) -> bool:
    """Whether it is; PyTorch has no kind of error of its own for the CPU's memory."""
    said = str(error).lower()
    known = ("out of memory", "can't allocate memory")
    return isinstance(error, MemoryError) or any(one in said for one in known)
