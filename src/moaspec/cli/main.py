"""The `moaspec` command: parse, call, print."""

import sys
from typing import Annotated, Any

import typer

from moaspec import __version__
from moaspec.cli.checkout import add_tool_command
from moaspec.cli.commands.calibrate import calibrate
from moaspec.cli.commands.chat_command import chat
from moaspec.cli.commands.check import check
from moaspec.cli.commands.checkpoint import app as checkpoint
from moaspec.cli.commands.data import app as data
from moaspec.cli.commands.demo import demo
from moaspec.cli.commands.evaluate import app as evaluate
from moaspec.cli.commands.generate import generate
from moaspec.cli.commands.info import info
from moaspec.cli.commands.models import app as models
from moaspec.cli.commands.serving.edge import edge
from moaspec.cli.commands.serving.remote import remote
from moaspec.cli.commands.serving.serve import serve
from moaspec.cli.commands.serving.target_server import target_server
from moaspec.cli.commands.serving.vllm_config import vllm_config
from moaspec.cli.commands.train import train
from moaspec.cli.entry import INTERRUPTED
from moaspec.cli.renamed import RenamedOptions
from moaspec.cli.terminal import console
from moaspec.cli.terminal.interrupts import TERMINATED, TerminatedError, raise_on_sigterm
from moaspec.errors import (
    HubError,
    InputError,
    MoaSpecError,
    RemoteError,
    ServerError,
    TrainingError,
)
from moaspec.support.causes import first_line
from moaspec.support.extras import has_torch, install_command

FAILURES = (HubError, RemoteError, ServerError, TrainingError)
"""Errors with exit code 1: they are not caused by bad input."""

ON_DEVICES = ("edge", "info", "remote")  # commands that work without PyTorch


class Commands(RenamedOptions):
    """Says that Ctrl-C has stopped a command which does not say it itself."""

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
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[  # noqa: ARG001 - its callback does it
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Options of every command."""
    console.DEBUG.set(debug)
    if not has_torch() and context.invoked_subcommand not in ON_DEVICES:
        raise InputError(
            f"`moaspec {context.invoked_subcommand}` needs PyTorch, which moaspec-device does not "
            f"install: {install_command(package='moaspec')}."
        )


for command in (
    generate,
    chat,
    info,
    train,
    calibrate,
    demo,
    check,
    serve,
    edge,
    vllm_config,
    remote,
):
    # `train` takes settings as options too, and refuses what is neither.
    app.command(context_settings={"ignore_unknown_options": command is train})(command)
app.command("target-server")(target_server)
add_tool_command(app, "edge_bench.command:edge_bench", "moaspec edge-bench")
app.add_typer(evaluate, name="eval")
app.add_typer(models, name="models")
app.add_typer(data)
app.add_typer(checkpoint)
if not has_torch():
    entries: list[Any] = [*app.registered_commands, *app.registered_groups]
    for entry in entries:
        entry.hidden = entry.callback not in (edge, info, remote)


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
