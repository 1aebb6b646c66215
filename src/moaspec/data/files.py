"""Data files: finding, decompressing and splitting them into lines."""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import lzma
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from moaspec.errors import DataError

SUFFIXES = {".jsonl", ".json", ".ndjson", ".parquet"}
PACKED_SUFFIXES = {".gz", ".bz2", ".xz", ".zst"}
PARQUET = b"PAR1"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_LINE_BYTES, MAX_LIST_BYTES = 1 << 26, 1 << 30
"""Maximum size of one line, and of a file that is one JSON list; uncompressed."""
PARQUET_ROWS = 256
"""Rows in memory at the same time."""
ADVICE = "Write one JSON object a line, one JSON list of objects, or a Parquet file."


def data_files(path: Path, skipped: list[str] | None = None) -> list[Path]:
    """The file itself, or all files of data below a directory, sorted.

    Args:
        path: file or directory.
        skipped: gets the names of the directory's other files; hidden ones are passed by.

    Raises:
        DataError: a directory without files of data.
    """
    if not path.is_dir():
        return [path]
    inside = [one for one in sorted(path.rglob("*")) if one.is_file() and not _hidden(one, path)]
    found = [one for one in inside if _suffix(one) in SUFFIXES]
    if skipped is not None:
        skipped += [str(one) for one in inside if _suffix(one) not in SUFFIXES]
    if not found:
        raise DataError(
            f"The directory {path} holds no data: no file that ends in "
            f"{', '.join(sorted(SUFFIXES))}, plain or compressed."
        )
    return found


def is_parquet(path: Path) -> bool:
    """Whether the file begins as Parquet does."""
    return _start(path).startswith(PARQUET)


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a Parquet file, a batch at a time.

    Raises:
        DataError: pyarrow is missing, or the file is damaged.
    """
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
        for number, line in enumerate(_lines(path, file), start=1):
            if number == 1:
                _refuse_other_encodings(path, line)
                line = line.removeprefix(BYTE_ORDER_MARK)
            if line.strip():
                yield number, line


def _lines(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Lines of a file; a long one is refused before it is read as a whole."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise DataError(
                f"{path}:{number}: a line of more than {MAX_LINE_BYTES >> 20} MiB. {ADVICE}"
            )
        yield line


def read_text(path: Path, max_bytes: int = MAX_LIST_BYTES) -> str:
    """A whole file as text.

    Raises:
        DataError: it cannot be read, is not UTF-8, or too large.
    """
    with _opened(path) as file:
        text = file.read(max_bytes + 1).removeprefix(BYTE_ORDER_MARK)
    if len(text) > max_bytes:
        raise DataError(
            f"{path}: more than {max_bytes >> 20} MiB in one list. Write one JSON object a line."
        )
    for number, line in enumerate(text.split(b"\n"), start=1):
        decoded(f"{path}:{number}", line)
    return text.decode()


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading; its first bytes say how it is compressed."""
    start = _start(path)
    opener = next((one for magic, one in _OPENERS.items() if start.startswith(magic)), Path.open)
    try:
        with opener(path, "rb") as file:
            yield file
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"Cannot read the data {path}: {error}") from error


def decoded(where: str, line: bytes) -> str:
    """A line as text.

    Raises:
        DataError: it is not UTF-8.
    """
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
        with path.open("rb") as file:
            return file.read(8)
    except OSError as error:
        raise DataError(f"Cannot read the data {path}: {error}") from error


def _open_zstd(path: Path, _: str) -> BinaryIO:
    arrow = _optional("pyarrow", f"{path} is compressed by zstd, which needs the package `pyarrow`")
    return cast(BinaryIO, io.BufferedReader(arrow.input_stream(str(path), compression="zstd")))


def _optional(module: str, why: str) -> Any:
    # Imported here: only such files need it.
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"{why}: pip install 'moaspec[data]'.") from error


_OPENERS: dict[bytes, Callable[[Path, str], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
    b"\x28\xb5\x2f\xfd": _open_zstd,
}
