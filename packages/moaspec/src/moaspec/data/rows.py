"""Rows of JSON and Parquet files, plain or compressed, directories of them, and the hub.

JSON is read here, not by `datasets`, whose reader names no line of a damaged file, makes dates of
texts that look like dates, and keeps a line without end in memory.
"""

import bz2
import gzip
import importlib
import io
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from moaspec.data.formats import FORMATS
from moaspec.hub import HUB, hub_rows, require_datasets
from moaspec_core.checkpoint.user_files import open_file
from moaspec_core.errors import DataError, InputError
from moaspec_core.support.causes import system_reason
from moaspec_core.support.extras import install_command

SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet")
PACKED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
PARQUET = b"PAR1"
UNPACKERS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
    b"\x28\xb5\x2f\xfd": lambda file: io.BufferedReader(
        _arrow().input_stream(file, compression="zstd")
    ),
}
"""What reads a compressed file, by its first bytes."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_LINE_BYTES, MAX_LIST_BYTES = 1 << 26, 1 << 30
"""Maximum size of one line, and of a file that is one JSON list; uncompressed."""
MAX_DESCRIPTION_BYTES = 1 << 22
PARQUET_ROWS = 256  # rows in memory at the same time
ADVICE = "Write one JSON object a line, one JSON list of objects, or a Parquet file."

OnMalformed = Callable[[DataError], None]
"""Called for a malformed row: raises the error, or counts it."""


@dataclass(frozen=True)
class Row:
    """One row and its place (`file:line`) for messages."""

    where: str
    value: dict[str, Any]


def refuse(error: DataError) -> None:
    """Raise the error of a malformed row; the default of `OnMalformed`."""
    raise error


def require_sources(sources: Sequence[str], out: Path | None = None) -> None:
    """Refuse sources that cannot be read at all, before a target is loaded for them.

    Raises:
        InputError: there are none, `datasets` is not installed, or see `require_outside`.
        DataError: a file that does not exist.
    """
    if not sources:
        raise InputError("data must name at least one file.")
    for source in sources:
        if source.startswith(HUB):
            require_datasets()
        elif not Path(source).exists():
            raise _absent(Path(source))
    if out is not None:
        require_outside(out, sources)


def require_outside(out: Path, sources: Sequence[str]) -> None:
    """InputError for an output inside a source, which the command would read when it resumes."""
    for source in sources:
        if out.resolve().is_relative_to(Path(source).resolve()):
            raise InputError(
                f"The output {out} is inside {source}, from which data are read; name another."
            )


def read_rows(
    source: str | Path, on_malformed: OnMalformed = refuse, skipped: list[str] | None = None
) -> Generator[Row]:
    """Rows of one source, in order; blank lines are skipped.

    Args:
        source: a file of JSON lines, a JSON list of objects, or Parquet; a directory of such files;
            or a data set of the hub, see `HUB`. Files may be compressed.
        on_malformed: called for each line or element other than a JSON object.
        skipped: gets the names of other files in a directory, and of files without rows.

    Raises:
        DataError: the source cannot be read; or an error of `on_malformed`.
    """
    if source == "":  # as a path it would be the directory that the command runs in
        raise DataError("A source of data has no name; give a file, a directory or a data set.")
    if str(source).startswith(HUB):
        yield from _table_rows(source, hub_rows(str(source)))
        return
    for path in data_files(Path(source), skipped):
        is_empty = True
        for row in _file_rows(path, on_malformed):
            is_empty = False
            yield row
        if is_empty and skipped is not None:
            skipped.append(str(path))


def data_files(path: Path, skipped: list[str] | None = None) -> list[Path]:
    """The file itself, or all files of data below a directory, sorted.

    Args:
        skipped: gets the names of the directory's other files; hidden ones are passed by.

    Raises:
        DataError: a directory without files of data.
    """
    if not path.is_dir():
        return [path]
    shown = (one for one in sorted(path.rglob("*")) if "/." not in f"/{one.relative_to(path)}")
    is_data = {one: _is_data(one) for one in shown if one.is_file()}
    if skipped is not None:
        skipped += [str(one) for one, holds in is_data.items() if not holds]
    if not any(is_data.values()):
        raise DataError(
            f"The directory {path} holds no data: no file that ends in {', '.join(SUFFIXES)}, "
            "plain or compressed."
        )
    return [one for one, holds in is_data.items() if holds]


def stem(path: Path) -> str:
    """A file's name without suffixes of its content and its compression."""
    return _unpacked(path).stem


def _unpacked(path: Path) -> Path:
    """The path without the suffix of its compression."""
    return path.with_suffix("") if path.suffix.lower() in PACKED_SUFFIXES else path


def _is_data(path: Path) -> bool:
    """By the name. But a JSON file of one object without a format's column describes data."""
    suffix = _unpacked(path).suffix.lower()
    if suffix != ".json":
        return suffix in SUFFIXES
    try:
        with _opened(path) as file:
            value = json.loads(file.read(MAX_DESCRIPTION_BYTES).removeprefix(BYTE_ORDER_MARK))
    except (DataError, ValueError, RecursionError):
        return True  # lines of JSON, or a long or damaged file, whose reading says what is wrong
    return not isinstance(value, dict) or not FORMATS.keys().isdisjoint(value)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file for reading, uncompressed."""
    try:
        with open_file(path) as packed:
            start = packed.peek(8)
            unpack = [one for magic, one in UNPACKERS.items() if start.startswith(magic)]
            with unpack[0](packed) if unpack else packed as file:
                yield file
    except FileNotFoundError as error:
        raise _absent(path) from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"Cannot read the data {path}: {system_reason(error)}.") from error


def _absent(path: Path) -> DataError:
    return DataError(
        f"Cannot read the data {path}: there is no such file or directory. Data of the hub are "
        "named hub:OWNER/NAME."
    )


def _arrow(module: str = "pyarrow") -> Any:
    # Imported here: only Parquet and zstd need it.
    try:
        return importlib.import_module(module)
    except ImportError as error:
        command = install_command("moaspec[data]")
        raise DataError(f"Parquet and zstd need the package `pyarrow`: {command}.") from error


def _file_rows(path: Path, on_malformed: OnMalformed) -> Iterator[Row]:
    with _opened(path) as file:
        if file.peek(4).startswith(PARQUET):
            yield from _table_rows(path, _parquet_rows(path, file))
            return
        lines = _numbered_lines(path, file)
        first = next(lines, None)
        if first is None:
            return
        if _LIST.match(first[1]):
            content = first[1] + file.read(MAX_LIST_BYTES)
            if len(content) > MAX_LIST_BYTES:
                raise DataError(
                    f"{path}: more than {MAX_LIST_BYTES >> 20} MiB in one list. {ADVICE}"
                )
            yield from _list_rows(path, _decoded(str(path), content), on_malformed)
        else:
            yield from _line_rows(path, chain([first], lines), on_malformed)


def _table_rows(name: str | Path, rows: Iterable[dict[str, Any]]) -> Iterator[Row]:
    for number, row in enumerate(rows, start=1):
        yield Row(f"{name}:{number}", _without_absent(row))


def _without_absent(value: Any) -> Any:
    """Tables give objects of a column the keys of all the others, with null; drop those keys."""
    if isinstance(value, dict):
        return {key: _without_absent(one) for key, one in value.items() if one is not None}
    return [_without_absent(one) for one in value] if isinstance(value, list) else value


def _parquet_rows(path: Path, file: Any) -> Iterator[dict[str, Any]]:
    try:
        for batch in _arrow("pyarrow.parquet").ParquetFile(file).iter_batches(PARQUET_ROWS):
            yield from batch.to_pylist()
    except ValueError as error:  # pyarrow's own errors are this or OSError
        raise DataError(f"Cannot read the data {path}: {error}. Is the file whole?") from error


def _numbered_lines(path: Path, file: Any) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank; DataError for what is no text in UTF-8, or a line too long."""
    # A long line is refused before it is read as a whole.
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
        if len(line) > MAX_LINE_BYTES:
            raise DataError(
                f"{path}:{number}: a line of more than {MAX_LINE_BYTES >> 20} MiB. {ADVICE}"
            )
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
            if line.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in line:
                raise DataError(
                    f"{path}:1: not UTF-8 text: it looks like a binary file, an archive or UTF-16. "
                    f"{ADVICE} UTF-16 is converted by iconv -f utf-16 -t utf-8."
                )
        if line.strip():
            yield number, line


def _line_rows(
    path: Path, lines: Iterable[tuple[int, bytes]], on_malformed: OnMalformed
) -> Iterator[Row]:
    for number, line in lines:
        where = f"{path}:{number}"
        try:
            value = json.loads(_decoded(where, line), object_pairs_hook=unique_keys)
            yield Row(where, _checked(where, value))
        except DataError as error:
            on_malformed(error)
        except (ValueError, RecursionError) as error:
            on_malformed(_not_json(where, error, line.decode()))


def _list_rows(path: Path, text: str, on_malformed: OnMalformed) -> Iterator[Row]:
    """Elements of a JSON list, one at a time. After an error of syntax the rest is left out."""
    number, place = 1, len(text) - len(text.lstrip()[1:].lstrip())
    while not text.startswith("]", place):
        where = f"{path}, element {number}"
        try:
            value, end = _DECODER.raw_decode(text, place)
            yield Row(where, _checked(where, value))
        except DataError as error:
            on_malformed(error)
        except (ValueError, RecursionError) as error:
            on_malformed(_not_json(where, error, text[place : place + 80]))
            return
        separator = _SEPARATOR.match(text, end)
        if separator is None:
            reason = "expected ',' or ']' after this element; is the file whole?"
            on_malformed(_not_json(where, reason, text[end : end + 80]))
            return
        number, place = number + 1, separator.end()
    if text[place + 1 :].strip():
        on_malformed(_not_json(str(path), "there is more after the list", text[place + 1 :]))


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; ValueError for duplicate keys, which Python's reader accepts silently."""
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} occurs twice")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=unique_keys)
_LIST = re.compile(rb"\s*\[\s*([{\]]|$)")  # the first line of a list of objects
_SEPARATOR = re.compile(r"\s*(?:,\s*|(?=]))")


def _checked(where: str, value: Any) -> dict[str, Any]:
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: it holds half of a surrogate pair, which is no character. Remove it."
        ) from error
    except RecursionError as error:
        raise DataError(f"{where}: objects and lists are nested too deeply.") from error
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected a JSON object, got {text[:80]!r}. {ADVICE}")
    return value


def _decoded(where: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8 ({error.reason} at byte {error.start}). Convert the file, for "
            "example with iconv -f latin1 -t utf-8."
        ) from error


def _not_json(where: str, error: Exception | str, text: str) -> DataError:
    return DataError(f"{where}: not JSON ({error}): {text.strip()[:80]!r}. {ADVICE}")
