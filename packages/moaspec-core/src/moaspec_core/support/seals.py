"""Seals of cached files: size and checksum, with which a later process finds damage.

A full disk, a killed copy or a lost power supply leaves files that are cut short or filled with
zeros. Used as they are, they kill the process or give wrong numbers.
"""

import contextlib
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

from moaspec_core.support.paths import close_to_others, make_private

SEAL_FILE = "seal.json"
_DIGEST = hashlib.sha256
_DIGEST_BYTES = 32
_BLOCK = 1 << 22
_MAX_SEAL_BYTES = 1 << 20


def seal_file(path: Path) -> None:
    """Append a hash to a file; loaders of libraries ignore what follows the last section."""
    with path.open("r+b") as file:
        content = file.read()
        file.write(_DIGEST(content).digest())
        file.flush()
        os.fsync(file.fileno())


def is_sealed_file(path: Path) -> bool:
    """Whether a file is as `seal_file` left it; OSError where it cannot be read."""
    content = path.read_bytes()
    return _DIGEST(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def cached_directory(directory: Path, make: Callable[[Path], object]) -> Path:
    """A directory of the cache, made where it is missing or damaged.

    Args:
        directory: its last part is a name that no other content has.
        make: called with a directory that does not exist, to make and fill.

    Raises:
        OSError: the cache cannot be written.
    """
    if is_whole(directory):
        return directory
    make_private(directory.parent)
    prefix = f".{directory.name}-"
    with tempfile.TemporaryDirectory(
        dir=directory.parent, prefix=prefix, ignore_cleanup_errors=True
    ) as scratch:
        made = Path(scratch) / "made"
        make(made)
        _seal(made)
        close_to_others(made)
        _put_in_place(made, directory)
    return directory


def is_whole(directory: Path) -> bool:
    """Whether a directory has all files that were sealed, unchanged.

    Files with the size and time of their sealing are not read again.
    """
    try:
        entries = _read_seal(directory)
        if not entries or not all(
            _is_unchanged(directory / name, entries[name]) for name in entries
        ):
            return False
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return False
    with contextlib.suppress(OSError):  # the cache may be read-only
        _renew_times(directory, entries)
    return True


def _read_seal(directory: Path) -> dict[str, dict[str, int]]:
    with (directory / SEAL_FILE).open("rb") as file:
        found: dict[str, dict[str, int]] = json.loads(file.read(_MAX_SEAL_BYTES))["files"]
    return dict(found)


def _is_unchanged(path: Path, entry: dict[str, int]) -> bool:
    status = path.stat()
    if not path.is_file() or status.st_size != entry["bytes"]:
        return False
    return status.st_mtime_ns == entry["mtime_ns"] or checksum(path) == entry["crc32"]


def _seal(directory: Path) -> None:
    files = [one for one in sorted(directory.rglob("*")) if one.is_file()]
    entries = {}
    for path in files:
        with path.open("rb+") as file:
            os.fsync(file.fileno())  # so that the seal never outlives the content
        name = path.relative_to(directory).as_posix()
        entries[name] = {
            "bytes": path.stat().st_size,
            "mtime_ns": path.stat().st_mtime_ns,
            "crc32": checksum(path),
        }
    _write_seal(directory, entries)


def _renew_times(directory: Path, entries: dict[str, dict[str, int]]) -> None:
    """Record the times of a copy, so that it is read as a whole only once."""
    times = {name: (directory / name).stat().st_mtime_ns for name in entries}
    if any(entries[name]["mtime_ns"] != time for name, time in times.items()):
        renewed = {name: {**entries[name], "mtime_ns": time} for name, time in times.items()}
        _write_seal(directory, renewed)


def _write_seal(directory: Path, entries: dict[str, dict[str, int]]) -> None:
    handle, scratch = tempfile.mkstemp(dir=directory, prefix=f".{SEAL_FILE}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"files": entries}, file)
        Path(scratch).replace(directory / SEAL_FILE)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


def checksum(path: Path, num_bytes: int | None = None) -> int:
    """CRC-32 of a file, or of its first bytes."""
    value, left = 0, path.stat().st_size if num_bytes is None else num_bytes
    with path.open("rb") as file:
        while left and (block := file.read(min(_BLOCK, left))):
            value, left = zlib.crc32(block, value), left - len(block)
    return value


def _put_in_place(made: Path, directory: Path) -> None:
    """Rename, unless another process has made it meanwhile; a damaged one is moved away first."""
    try:
        made.rename(directory)
    except OSError:
        if is_whole(directory):
            return
        with contextlib.suppress(FileNotFoundError):
            directory.rename(made.with_name("damaged"))
        made.rename(directory)
