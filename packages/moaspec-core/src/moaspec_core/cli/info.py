"""`moaspec info CHECKPOINT`: shows the contents of a checkpoint."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from moaspec_core.bundled import bundled_drafters
from moaspec_core.checkpoint.directory import is_directory, is_file
from moaspec_core.cli.options import Json
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.status import loading
from moaspec_core.errors import InputError, UnknownModelError
from moaspec_core.support.extras import has_torch, install_command

GROUP = "moaspec.formats"
"""Entry points that name a `Format`."""
FALLBACK = "checkpoint"
"""The entry point for directories that no other format recognises."""


@dataclass(frozen=True)
class Format:
    """A format of directories with a drafter.

    Attributes:
        recognises: whether a directory has it.
        describe: the contents of a directory, its weights read and checked.
        needs_torch: whether `describe` needs PyTorch.
    """

    recognises: Callable[[Path], bool]
    describe: Callable[[Path], dict[str, Any]]
    needs_torch: bool


def format_of(directory: Path) -> Format:
    """The format of a directory.

    Raises:
        InputError: only PyTorch could read it, which is not installed.
    """
    points = sorted(entry_points(group=GROUP), key=lambda point: point.name == FALLBACK)
    formats: Iterator[Format] = (point.load() for point in points)
    found = next((one for one in formats if one.recognises(directory)), None)
    if found is None or (found.needs_torch and not has_torch()):
        raise InputError(
            f"{directory} holds no ONNX bundle, or its manifest.json is damaged; without PyTorch "
            f"`moaspec info` shows nothing else: {install_command('moaspec')}."
        )
    return found


def info(
    checkpoint: Annotated[str, typer.Argument(help="Bundled alias or directory.")],
    as_json: Json = False,
) -> None:
    """Show the contents of a checkpoint or bundle.

    Its weights are read and checked.

    Example: moaspec info smollm2-135m
    """
    directory = bundled_drafters().get(checkpoint, Path(checkpoint))
    if is_file(directory):
        raise UnknownModelError(
            f"{checkpoint!r} is a file; `moaspec info` shows drafters, which are directories. A "
            f"GGUF file is a target: give it to other commands as --model {checkpoint}."
        )
    if not is_directory(directory):
        raise UnknownModelError(
            f"No checkpoint {checkpoint!r}: not a directory, and not bundled "
            f"({', '.join(bundled_drafters()) or 'none'})."
        )
    kind = format_of(directory)
    with loading(checkpoint, torch=kind.needs_torch):
        content = kind.describe(directory)
    if as_json:
        console.out.print(json.dumps(content))
        return
    lines = list(_lines(content))
    width = max(len(name) for name, _ in lines)
    console.out.print(Text(str(directory), style="bold"))
    for name, value in lines:
        line = Text(f"{name:<{width}}  {value}")
        console.out.print(line, soft_wrap=False, no_wrap=True, overflow="ellipsis")
    console.print_wrapped("--json prints long values whole.", "dim")


def _lines(content: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Names and values; a nested key has the name of its parent before it."""
    for key, value in content.items():
        name = f"{above}{key}"
        if isinstance(value, dict) and value:
            yield from _lines(value, f"{name}.")
        elif isinstance(value, list) and not any(isinstance(one, dict | list) for one in value):
            yield name, ", ".join(map(str, value)) or "none"
        else:
            yield name, json.dumps(value) if isinstance(value, dict | list) else str(value)
