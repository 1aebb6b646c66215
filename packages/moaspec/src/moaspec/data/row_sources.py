"""Rows of JSON and Parquet files, plain or compressed, directories of them, and the hub."""

import bz2
import gzip
import importlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, cast

from moaspec.data.row_shapes import ROW_COLUMNS
from moaspec.hub import HUB, hub_rows, require_datasets
from moaspec_core.checkpoint.user_files import open_file
from moaspec_core.errors import DataError, InputError
from moaspec_core.support.causes import system_reason
from moaspec_core.support.extras import install_command

SUFFIXES = {".jsonl", ".json", ".ndjson", ".parquet"}
PACKED_SUFFIXES = {".gz", ".bz2", ".xz", ".zst"}
DESCRIPTIONS = ("dataset_info", "dataset_infos", "dataset_dict", "state")
"""Names of JSON files that programs write beside data."""
PARQUET = b"PAR1"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_LINE_BYTES, MAX_LIST_BYTES = 1 << 26, 1 << 30
"""Maximum size of one line, and of a file that is one JSON list; uncompressed."""
MAX_DESCRIPTION_BYTES = 1 << 22
PARQUET_ROWS = 256  # rows in memory at the same time
ADVICE = "Write one JSON object a line, one JSON list of objects, or a Parquet file."


def data_files(path: Path, skipped: list[str] | None = None) -> list[Path]:
    """The file itself, or all files of data below a directory, sorted.

    Args:
        skipped: gets the names of the directory's other files; hidden ones are passed by.

    Raises:
        DataError: a directory without files of data.
    """
    if not path.is_dir():
        return [path]
    inside = [one for one in sorted(path.rglob("*")) if one.is_file() and not _hidden(one, path)]
    found = [one for one in inside if _suffix(one) in SUFFIXES and not _is_description(one)]
    if skipped is not None:
        data = set(found)
        skipped += [str(one) for one in inside if one not in data]
    if not found:
        raise DataError(
            f"The directory {path} holds no data: no file that ends in "
            f"{', '.join(sorted(SUFFIXES))}, plain or compressed."
        )
    return found


def _is_description(path: Path) -> bool:
    """Whether a JSON file beside data is about them: one object without a column of rows."""
    if _suffix(path) != ".json":
        return False
    if stem(path) in DESCRIPTIONS:
        return True
    try:
        value = json.loads(read_text(path, MAX_DESCRIPTION_BYTES))
    except (DataError, ValueError, RecursionError):
        return False  # lines of JSON, or a damaged file, whose reading says what is wrong
    return isinstance(value, dict) and ROW_COLUMNS.isdisjoint(value)


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a Parquet file in batches; DataError without pyarrow, or for a damaged file."""
    parquet = _optional("pyarrow.parquet", f"{path} is Parquet, which needs the package `pyarrow`")
    try:
        for batch in parquet.ParquetFile(path).iter_batches(PARQUET_ROWS):
            yield from batch.to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are among these
        raise DataError(f"Cannot read the data {path}: {error}. Is the file whole?") from error


def numbered_lines(path: Path) -> Generator[tuple[int, bytes]]:
    """Lines that are not blank, uncompressed, without byte order mark.

    Raises:
        DataError: the file cannot be read, is no text in UTF-8, or has a line beyond the limit.
    """
    with _opened(path) as file:
        # A long line is refused before it is read as a whole.
        lines = iter(lambda: file.readline(MAX_LINE_BYTES + 1), b"")
        for number, line in enumerate(lines, start=1):
            if len(line) > MAX_LINE_BYTES:
                raise DataError(
                    f"{path}:{number}: a line of more than {MAX_LINE_BYTES >> 20} MiB. {ADVICE}"
                )
            if number == 1:
                _refuse_other_encodings(path, line)
                line = line.removeprefix(BYTE_ORDER_MARK)
            if line.strip():
                yield number, line


def read_text(path: Path, max_bytes: int = MAX_LIST_BYTES) -> str:
    """A whole file as text; DataError where it cannot be read, is not UTF-8, or is too large."""
    with _opened(path) as file:
        text = file.read(max_bytes + 1).removeprefix(BYTE_ORDER_MARK)
    if len(text) > max_bytes:
        raise DataError(
            f"{path}: more than {max_bytes >> 20} MiB in one list. Write one JSON object a line."
        )
    return decoded(str(path), text)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading; its first bytes say how it is compressed."""
    start = _start(path)
    opener = next((one for magic, one in _OPENERS.items() if start.startswith(magic)), Path.open)
    try:
        with opener(path, "rb") as file:
            yield file
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = system_reason(error)
        raise DataError(f"Cannot read the data {path}: {reason}") from error


def decoded(where: str, line: bytes) -> str:
    """A line as text; DataError where it is not UTF-8."""
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8 ({error.reason} at byte {error.start}). Convert the file, for "
            "example with iconv -f latin1 -t utf-8."
        ) from error


def _refuse_other_encodings(path: Path, line: bytes) -> None:
    if line.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in line:
        raise DataError(
            f"{path}:1: not UTF-8 text: it looks like UTF-16 or a binary file. {ADVICE} "
            "UTF-16 is converted by iconv -f utf-16 -t utf-8."
        )
    if line.startswith(b"PK\x03\x04"):
        raise DataError(f"{path}:1: a zip archive. Unpack it and name the files in it.")


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def stem(path: Path) -> str:
    """A file's name without suffixes of its content and its compression."""
    return _unpacked(path).stem


def _suffix(path: Path) -> str:
    return _unpacked(path).suffix.lower()


def _unpacked(path: Path) -> Path:
    """The path without the suffix of its compression."""
    return path.with_suffix("") if path.suffix.lower() in PACKED_SUFFIXES else path


def _start(path: Path) -> bytes:
    try:
        with open_file(path) as file:
            return file.read(8)
    except FileNotFoundError as error:
        raise DataError(
            f"Cannot read the data {path}: there is no such file or directory. Data of the hub are "
            "named hub:OWNER/NAME."
        ) from error
    except OSError as error:
        raise DataError(f"Cannot read the data {path}: {error.strerror or error}.") from error


def _open_zstd(path: Path, _: str) -> BinaryIO:
    arrow = _optional("pyarrow", f"{path} is compressed by zstd, which needs the package `pyarrow`")
    return cast(BinaryIO, io.BufferedReader(arrow.input_stream(str(path), compression="zstd")))


def _optional(module: str, why: str) -> Any:
    # Imported here: only such files need it.
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"{why}: {install_command('moaspec[data]')}.") from error


_OPENERS: dict[bytes, Callable[[Path, str], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
    b"\x28\xb5\x2f\xfd": _open_zstd,
}


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


def require_sources(sources: Sequence[str], out: Path | None = None) -> None:
    """Refuse sources that cannot be read at all, before a target is loaded for them.

    Raises:
        InputError: there are none, the extra `hub` is not installed, or see `require_outside`.
        DataError: a file that does not exist.
    """
    if not sources:
        raise InputError("data must name at least one file.")
    for source in sources:
        if source.startswith(HUB):
            require_datasets()
        elif not Path(source).exists():
            raise DataError(
                f"Cannot read the data {source}: there is no such file. "
                "Check the path; a data set of the hub is hub:OWNER/NAME."
            )
    if out is not None:
        require_outside(out, sources)


def require_outside(out: Path, sources: Sequence[str]) -> None:
    """InputError for an output inside a source, which the command would read when it resumes."""
    for source in sources:
        if out.resolve().is_relative_to(Path(source).resolve()):
            raise InputError(
                f"The output {out} is inside {source}, from which data are read; name another."
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
    if source == "":  # as a path it would be the directory that the command runs in
        raise DataError("A source of data has no name; give a file, a directory or a data set.")
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
    if _start(path).startswith(PARQUET):
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
    """Elements of a JSON list, one at a time, each with its number."""
    start = _START.match(text)
    assert start is not None, "it begins with '['"
    number, place = 1, start.end()
    while not text.startswith("]", place):
        where = f"{path}, element {number}"
        try:
            value, place = _DECODER.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise _not_json(where, str(error), text[place : place + 80]) from error
        yield where, value
        separator = _SEPARATOR.match(text, place)
        if separator is None:
            what = "expected ',' or ']' after this element; is the file whole?"
            raise _not_json(where, what, text[place : place + 80])
        number, place = number + 1, separator.end()
    rest = text[place + 1 :].strip()
    if rest:
        raise _not_json(str(path), "there is more after the list", rest)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; ValueError for duplicate keys, which Python's reader accepts silently."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=unique_keys)
_START, _SEPARATOR = re.compile(r"\s*\[\s*"), re.compile(r"\s*(,\s*|(?=\]))")


def _object(where: str, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line, object_pairs_hook=unique_keys)
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
