"""Where rows of data come from: JSON lines, plain or gzipped, and data sets of the hub."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from moaspec.errors import DataError
from moaspec.hub import HUB, hub_rows, require_datasets

OnMalformed = Callable[[DataError], None]
"""What to do about a malformed row: raise the error, or count it and go on."""


@dataclass(frozen=True)
class Record:
    """One row, and how messages call its place (`file:line`)."""

    where: str
    value: dict[str, Any]


def require_sources(sources: Sequence[str]) -> None:
    """Refuse sources that cannot be read at all, before a target is loaded for them.

    Raises:
        InputError: the extra `hub` is not installed.
        DataError: a file that does not exist.
    """
    for source in sources:
        if source.startswith(HUB):
            require_datasets()
        elif not Path(source).exists():
            raise DataError(f"Cannot read the data {source}: there is no such file.")


def refuse(error: DataError) -> None:
    """The usual answer to a malformed row."""
    raise error


def read_records(source: str | Path, on_malformed: OnMalformed = refuse) -> Iterator[Record]:
    """Rows of one source, in order; blank lines are skipped.

    Args:
        source: a JSONL file (`.gz` allowed), or a data set of the hub, see `HUB`.
        on_malformed: called for each line that is no JSON object.

    Raises:
        DataError: the source cannot be read; or whatever `on_malformed` raises.
    """
    if str(source).startswith(HUB):
        for number, row in enumerate(hub_rows(str(source)), start=1):
            yield Record(f"{source}:{number}", row)
        return
    for where, line in _lines(Path(source)):
        try:
            yield Record(where, _object(where, line))
        except DataError as error:
            on_malformed(error)


def _object(where: str, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}): {line.strip()[:80]!r}.") from error
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected a JSON object, got {line.strip()[:80]!r}.")
    if "\\u" in line and any(map(_is_half, json.dumps(value, ensure_ascii=False))):
        raise DataError(f"{where}: it holds half of a surrogate pair, which is no character.")
    return value


def _is_half(character: str) -> bool:
    return "\ud800" <= character <= "\udfff"


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    try:
        with _open_text(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", line
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise DataError(f"Cannot read the data {path}: {error}") from error


def _open_text(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")
