"""A file of rows that grows by whole groups, whatever interrupts the writing.

A group's rows are appended and flushed to disk; then a small file beside the data, replaced in one
step, records how long the data are now. Whatever a killed process left behind that length is cut
off on the next start, so a row is there once or not at all.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moaspec.errors import DataError, InputError, TrainingError
from moaspec.support.locks import claim


@dataclass(frozen=True, kw_only=True)
class _Progress:
    """What is safely on disk.

    Attributes:
        settings: what the rows depend on.
        groups, rows, num_bytes: how much there is.
    """

    settings: dict[str, Any]
    groups: int = 0
    rows: int = 0
    num_bytes: int = 0


class Journal:
    """Appends groups of JSON lines to a file: all of a group, or nothing.

    Args:
        path: the file; compressed when its name ends in `.gz` (each group is a gzip member).
        settings: what the rows depend on; a later run must bring the same.

    Raises:
        InputError: the file is not this command's, was begun with other settings, or is being
            written by another process.
        DataError: the file is shorter than what was recorded.
        TrainingError: the disk refuses to be written.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self._note = path.with_name(path.name + ".progress")
        self._progress = _Progress(settings=json.loads(json.dumps(settings)))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise TrainingError(
                f"Cannot write {path}: {error.strerror}. Name another file."
            ) from error
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    @property
    def groups(self) -> int:
        """Groups that are safely on disk."""
        return self._progress.groups

    @property
    def rows(self) -> int:
        """Rows that are safely on disk."""
        return self._progress.rows

    def commit(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append the next group; when this returns, it survives a power cut.

        Raises:
            TrainingError: the disk is full or broken; the file holds the groups before this one.
        """
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        if self.path.suffix == ".gz" and data:
            data = gzip.compress(data, mtime=0)
        before = self._progress
        after = _Progress(
            settings=before.settings,
            groups=before.groups + 1,
            rows=before.rows + len(rows),
            num_bytes=before.num_bytes + len(data),
        )
        try:
            self._append(data)
            self._record(after)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, before.num_bytes)
            raise self._failed(error) from error
        self._progress = after

    def close(self) -> None:
        """Let another process write."""
        os.close(self._file)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> None:
        """Take up what an earlier run left, without what it did not finish."""
        claim(self._file, f"{self.path} is being written by another process.")
        self._progress = self._recorded(self._progress.settings) or self._progress
        try:
            self._record(self._progress)
            os.ftruncate(self._file, self._progress.num_bytes)
        except OSError as error:
            raise self._failed(error) from error

    def _append(self, data: bytes) -> None:
        offset, rest = self._progress.num_bytes, memoryview(data)
        while rest:
            written = os.pwrite(self._file, rest, offset)
            offset, rest = offset + written, rest[written:]
        os.fsync(self._file)

    def _record(self, progress: _Progress) -> None:
        scratch = self._note.with_name(self._note.name + ".partial")
        with scratch.open("w", encoding="utf-8") as file:
            json.dump(asdict(progress), file)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(self._note)

    def _recorded(self, wanted: dict[str, Any]) -> _Progress | None:
        """What an earlier run left, if there was one."""
        size = os.fstat(self._file).st_size
        if not self._note.exists():
            if size:
                raise InputError(
                    f"{self.path} exists, and {self._note.name} is not beside it, so it was not "
                    "written by this command. Choose another output file."
                )
            return None
        progress = self._parsed()
        if size < progress.num_bytes:
            raise DataError(
                f"{self.path} has {size} bytes, {progress.num_bytes} were written. Restore it, or "
                f"delete it and {self._note.name} to begin again."
            )
        _require_equal(progress.settings, wanted, self.path)
        return progress

    def _parsed(self) -> _Progress:
        try:
            progress = _Progress(**json.loads(self._note.read_text(encoding="utf-8")))
            numbers = (progress.groups, progress.rows, progress.num_bytes)
            if not isinstance(progress.settings, dict) or min(map(operator.index, numbers)) < 0:
                raise ValueError("a field is of another type")
            return progress
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise DataError(
                f"Cannot read {self._note} ({error}). Delete it and {self.path.name} to begin "
                "again."
            ) from error

    def _failed(self, error: OSError) -> TrainingError:
        return TrainingError(
            f"Cannot write {self.path}: {error.strerror}. The {self.rows} rows before are intact; "
            "make room and run the same command again, which continues there."
        )


def _require_equal(recorded: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    for key in {**recorded, **wanted}:
        was, now = recorded.get(key), wanted.get(key)
        if was != now:
            raise InputError(
                f"{path} was begun with {key}={was!r}, now it is {now!r}: the rows would not fit "
                "together. Use the same settings or another output file."
            )
