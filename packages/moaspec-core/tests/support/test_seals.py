"""Cached files that are damaged are made again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moaspec_core.support.seals import (
    SEAL_FILE,
    cached_directory,
    is_sealed_file,
    is_whole,
    seal_file,
)

CONTENT = bytes(range(256)) * 20


def make(directory: Path) -> None:
    (directory / "part").mkdir(parents=True)
    (directory / "weights").write_bytes(CONTENT)
    (directory / "part" / "config").write_bytes(b"{}")


def cut(directory: Path) -> None:
    os.truncate(directory / "weights", len(CONTENT) // 2)


def zeroed(directory: Path) -> None:
    os.utime(directory / "weights", (0, 0))
    (directory / "weights").write_bytes(bytes(len(CONTENT)))


def emptied(directory: Path) -> None:
    (directory / "part" / "config").write_bytes(b"")


def missing(directory: Path) -> None:
    (directory / "part" / "config").unlink()


def another_kind(directory: Path) -> None:
    (directory / "weights").unlink()
    (directory / "weights").mkdir()


def without_seal(directory: Path) -> None:
    (directory / SEAL_FILE).unlink()


def empty_seal(directory: Path) -> None:
    (directory / SEAL_FILE).write_bytes(b"")


def list_as_seal(directory: Path) -> None:
    (directory / SEAL_FILE).write_text('{"files": [1]}')


def seal_of_nothing(directory: Path) -> None:
    (directory / SEAL_FILE).write_text('{"files": {}}')


def a_file(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.write_bytes(b"garbage")


DAMAGE = (
    *(cut, zeroed, emptied, missing, another_kind),
    *(without_seal, empty_seal, list_as_seal, seal_of_nothing, a_file),
)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_directory_is_made_again(damage: Callable[[Path], None], tmp_path: Path) -> None:
    made = cached_directory(tmp_path / "kept", make)
    damage(made)
    assert not is_whole(made)
    assert cached_directory(made, make) == made
    assert is_whole(made)
    assert (made / "weights").read_bytes() == CONTENT
    assert [one.name for one in tmp_path.iterdir()] == ["kept"]


def test_a_whole_directory_is_kept(tmp_path: Path) -> None:
    made = cached_directory(tmp_path / "kept", make)
    before = made.stat()
    assert cached_directory(made, make).stat().st_ino == before.st_ino


def test_a_copy_is_whole_and_compared_only_once(tmp_path: Path) -> None:
    """Its files have other times than the seal says."""
    made = cached_directory(tmp_path / "kept", make)
    copy = tmp_path / "copy"
    shutil.copytree(made, copy, copy_function=shutil.copyfile)
    os.utime(copy / "weights", (1, 1))
    assert is_whole(copy)
    times = (copy / SEAL_FILE).stat()
    assert is_whole(copy)
    assert (copy / SEAL_FILE).stat().st_mtime_ns == times.st_mtime_ns


def test_another_process_may_make_it_first(tmp_path: Path) -> None:
    final = tmp_path / "kept"

    def late(place: Path) -> None:
        make(place)
        cached_directory(final, make)

    assert cached_directory(final, late) == final
    assert is_whole(final)


def test_what_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    def full(place: Path) -> None:
        make(place)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cached_directory(tmp_path / "kept", full)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [0, 10, len(CONTENT), len(CONTENT) + 31])
def test_a_sealed_file_that_is_cut(size: int, tmp_path: Path) -> None:
    path = tmp_path / "library"
    path.write_bytes(CONTENT)
    assert not is_sealed_file(path)
    seal_file(path)
    assert is_sealed_file(path)
    os.truncate(path, size)
    assert not is_sealed_file(path)
