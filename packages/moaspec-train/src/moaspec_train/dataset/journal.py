"""An output file of JSON lines that is written in whole groups and survives a kill at any point.

A group's rows are appended and flushed to disk. Then a small `.progress` file beside the data is
replaced atomically; it records the valid length and a checksum. A restart cuts off everything
beyond that length, so each row is in the file once or not at all, and refuses a changed file.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, NonNegativeInt

from moaspec_core.errors import DataError, InputError, TrainingError
from moaspec_core.support.locks import claimed
from moaspec_core.support.seals import checksum


class _Progress(BaseModel, strict=True, extra="forbid"):
    """The part of the file that is flushed to disk."""

    settings: dict[str, Any]
    # groups, rows, num_bytes: written so far.
    groups: NonNegativeInt = 0
    rows: NonNegativeInt = 0
    num_bytes: NonNegativeInt = 0
    checksum: NonNegativeInt = 0  # of these bytes
    # Rows of finished conversations of later groups, by the conversation's number.
    kept: dict[str, list[dict[str, Any]]] = Field(default_factory=dict)


def resumed(path: Path, settings: Mapping[str, Any], *, complete: bool = True) -> _Progress:
    """The progress of an earlier run with these settings, or none yet.

    Args:
        complete: False compares only those settings that are given and recorded.

    Raises:
        InputError, DataError: see `Journal`.
    """
    settings, progress_path = json.loads(json.dumps(settings)), _progress_path(path)
    if not progress_path.exists():
        if path.exists() and path.stat().st_size:
            raise InputError(
                f"{path} exists, and {progress_path.name} is not beside it, so it "
                "was not written by this command. Choose another output file."
            )
        return _Progress(settings=dict(settings))
    try:
        progress = _parsed(progress_path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(
            f"Cannot read {progress_path}, or it is damaged. Delete it and "
            f"{path.name} to begin again."
        ) from error
    size = path.stat().st_size if path.exists() else 0  # read last, it grows first
    if size < progress.num_bytes:
        raise DataError(
            f"{path} has {size} bytes, {progress.num_bytes} were written. Restore it, or "
            f"delete it and {progress_path.name} to begin again."
        )
    # Without bytes there may be no file yet.
    if progress.num_bytes and progress.checksum != checksum(path, progress.num_bytes):
        raise DataError(
            f"{path} is not as it was written: some of its first {progress.num_bytes} bytes are "
            f"others. Restore it, or delete it and {progress_path.name} to begin again."
        )
    before = progress.settings
    for key in {**before, **settings} if complete else sorted(before.keys() & settings):
        was, now = before.get(key), settings.get(key)
        if was != now:
            raise InputError(
                f"{path} was begun with {key}={was!r}, now it is {now!r}: the rows would "
                "not fit together. Use the same settings or another output file."
            )
    return progress


def _parsed(data: bytes) -> _Progress:
    """The content of a progress file: JSON, and its checksum in a second line."""
    text, _, written = data.partition(b"\n")
    if not written or int(written) != zlib.crc32(text):
        raise ValueError("it is not as it was written")
    return _Progress.model_validate_json(text)


def _progress_path(path: Path) -> Path:
    return path.with_name(path.name + ".progress")


class Journal:
    """Appends groups of JSON lines to a file, each group atomically.

    Args:
        path: the file; compressed if its name ends in `.gz` (each group is a gzip member).
        settings: determine the rows; a resumed run must have the same.

    Raises:
        InputError: another command wrote the file, it was begun with other settings, or another
            process is writing it.
        DataError: the file is shorter than recorded.
        TrainingError: the file cannot be written.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self._progress_path = _progress_path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = claimed(path, f"{path} is being written by another process.")
        except OSError as error:
            raise TrainingError(
                f"Cannot write {path}: {error.strerror}. Name another file."
            ) from error
        try:
            self._progress = resumed(path, settings)
            with self._explained():
                self._record(self._progress)
                os.ftruncate(self._file, self._progress.num_bytes)
        except BaseException:
            self.close()
            raise

    @property
    def groups(self) -> int:
        return self._progress.groups

    @property
    def rows(self) -> int:
        return self._progress.rows

    @property
    def kept(self) -> dict[int, list[dict[str, Any]]]:
        """What `keep` was given since the last group."""
        return {int(number): rows for number, rows in self._progress.kept.items()}

    def keep(self, finished: Mapping[int, Sequence[Mapping[str, Any]]]) -> None:
        """Keep rows of unfinished groups, so that their conversations need not be repeated.

        Args:
            finished: rows by the conversation's number.

        Raises:
            TrainingError: the disk is full or broken.
        """
        kept = {str(number): [dict(row) for row in rows] for number, rows in finished.items()}
        self._progress = self._progress.model_copy(update={"kept": kept})
        with self._explained():
            self._record(self._progress)

    def commit(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append a group and flush it; TrainingError if that fails, which keeps earlier groups."""
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        if self.path.suffix == ".gz" and data:
            data = gzip.compress(data, mtime=0)
        before = self._progress
        after = _Progress(
            settings=before.settings,
            groups=before.groups + 1,
            rows=before.rows + len(rows),
            num_bytes=before.num_bytes + len(data),
            checksum=zlib.crc32(data, before.checksum),
        )
        with self._explained():
            self._append(data)
            self._record(after)
        self._progress = after

    def close(self) -> None:
        """Release the file for other processes."""
        os.close(self._file)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, data: bytes) -> None:
        offset, rest = self._progress.num_bytes, memoryview(data)
        while rest:
            written = os.pwrite(self._file, rest, offset)
            offset, rest = offset + written, rest[written:]
        os.fsync(self._file)

    def _record(self, progress: _Progress) -> None:
        scratch = self._progress_path.with_name(self._progress_path.name + ".partial")
        try:
            with scratch.open("wb") as file:
                text = progress.model_dump_json().encode()
                file.write(b"%b\n%d" % (text, zlib.crc32(text)))
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(self._progress_path)
        finally:
            scratch.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Cut off what was not recorded and say how to continue."""
        try:
            yield
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._progress.num_bytes)
            raise TrainingError(
                f"Cannot write {self.path}: {error.strerror}. The {self.rows} rows before are "
                "intact; make room and run the same command again, which continues there."
            ) from error
