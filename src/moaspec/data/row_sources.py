"""Reads rows from JSON and Parquet files, directories of them, and the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from moaspec.data.files import (
    ADVICE,
    data_files,
    decoded,
    is_parquet,
    numbered_lines,
    parquet_rows,
    read_text,
)
from moaspec.errors import DataError
from moaspec.support.hub import HUB, hub_rows, require_datasets

OnMalformed = Callable[[DataError], None]
"""Called for a malformed row: raises the error, or counts it."""


@dataclass(frozen=True)
class Record:
    """One row and its place (`file:line`) for messages."""

    where: str
    value: dict[str, Any]


def refuse(error: DataError) -> None:
    """Raise the error of a malformed row; the default of `OnMalformed`."""
    raise error


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
            raise DataError(
                f"Cannot read the data {source}: there is no such file. "
                "Check the path; a data set of the hub is hub:OWNER/NAME."
            )


def read_records(
    source: str | Path, on_malformed: OnMalformed = refuse, skipped: list[str] | None = None
) -> Generator[Record]:
    """Rows of one source, in order; blank lines are skipped.

    Args:
        source: a file of JSON lines, a JSON list of objects, or Parquet; a directory of such files;
            or a data set of the hub, see `HUB`. Files may be compressed.
        on_malformed: called for each line or element other than a JSON object.
        skipped: gets the names of other files in a directory, and of files without rows.

    Raises:
        DataError: the source cannot be read; or an error of `on_malformed`.
    """
    if str(source).startswith(HUB):
        for number, row in enumerate(hub_rows(str(source)), start=1):
            yield Record(f"{source}:{number}", _without_absent(row))
        return
    for path in data_files(Path(source), skipped):
        is_empty = True
        for record in _file_records(path, on_malformed):
            is_empty = False
            yield record
        if is_empty and skipped is not None:
            skipped.append(str(path))


def _file_records(path: Path, on_malformed: OnMalformed) -> Iterator[Record]:
    if is_parquet(path):
        for number, row in enumerate(parquet_rows(path), start=1):
            yield Record(f"{path}:{number}", _without_absent(row))
        return
    with closing(numbered_lines(path)) as lines:  # errors would leave the file open
        head = list(islice(lines, 2))
        if not _begins_list(b"".join(line for _, line in head)):
            yield from _line_records(path, chain(head, lines), on_malformed)
            return
    yield from _list_records(path, read_text(path), on_malformed)


def _without_absent(value: Any) -> Any:
    """Tables give objects of a column the keys of all the others, with null; drop those keys."""
    if isinstance(value, dict):
        return {key: _without_absent(one) for key, one in value.items() if one is not None}
    return [_without_absent(one) for one in value] if isinstance(value, list) else value


def _begins_list(start: bytes) -> bool:
    """Whether a file is one list of objects."""
    start = start.lstrip()
    return start.startswith(b"[") and start[1:].lstrip()[:1] in (b"{", b"]", b"")


def _line_records(
    path: Path, lines: Iterator[tuple[int, bytes]], on_malformed: OnMalformed
) -> Iterator[Record]:
    for number, line in lines:
        where = f"{path}:{number}"
        try:
            yield Record(where, _object(where, decoded(where, line)))
        except DataError as error:
            on_malformed(error)


def _list_records(path: Path, text: str, on_malformed: OnMalformed) -> Iterator[Record]:
    """Elements of a list. After an error of syntax the rest of the file is left out."""
    try:
        for where, value in _elements(path, text):
            try:
                yield Record(where, _checked(where, value))
            except DataError as error:
                on_malformed(error)
    except DataError as error:
        on_malformed(error)


def _elements(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Elements of a JSON list, each with the place of its first line."""
    line, counted = 1, 0
    place = _past_space(text, text.index("[") + 1)
    while not text.startswith("]", place):
        line, counted = line + text.count("\n", counted, place), place
        where = f"{path}:{line}"
        try:
            value, place = _DECODER.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise _not_json(where, str(error), text[place : place + 80]) from error
        yield where, value
        place = _past_space(text, place)
        if text.startswith(",", place):
            place = _past_space(text, place + 1)
        elif not text.startswith("]", place):
            raise _not_json(
                _place(path, text, place),
                "expected ',' or ']' after an element",
                text[place : place + 80],
            )
    rest = text[place + 1 :].strip()
    if rest:
        where = _place(path, text, text.rindex(rest))
        raise _not_json(where, "there is more after the list", rest)


def _place(path: Path, text: str, index: int) -> str:
    return f"{path}:{text.count(chr(10), 0, index) + 1}"


def _past_space(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    return found.end() if found else place


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse duplicate keys, which Python's JSON reader accepts silently."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)
_SPACE = re.compile(r"\s*")


def _object(where: str, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _not_json(where, str(error), line) from error
    return _checked(where, value)


def _not_json(where: str, error: str, text: str) -> DataError:
    return DataError(f"{where}: not JSON ({error}): {text.strip()[:80]!r}. {ADVICE}")


def _checked(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(
            f"{where}: expected a JSON object, got {json.dumps(value)[:80]!r}. {ADVICE}"
        )
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: it holds half of a surrogate pair, which is no character. Remove it."
        ) from error
    except RecursionError as error:
        raise DataError(f"{where}: objects and lists are nested too deeply.") from error
    return value
