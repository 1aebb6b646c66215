"""A file that grows by whole groups, wherever the writing stops."""

from __future__ import annotations

import errno
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moaspec_core.errors import DataError, InputError, TrainingError
from moaspec_train.dataset.journal import Journal

SETTINGS = {"model": "tiny", "sizes": (1, 2)}
GROUPS: list[list[dict[str, Any]]] = [
    [{"n": 0}, {"n": 1}],
    [],
    [{"n": 2, "text": "é"}],
    [{"n": 3}, {"n": 4}, {"n": 5}],
]
NAMES = ("rows.jsonl", "rows.jsonl.gz")


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody cuts the power here, and real disks take their time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def written(path: Path) -> list[int]:
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return [json.loads(line)["n"] for line in text.decode().splitlines()]


def write_rest(path: Path) -> None:
    with Journal(path, SETTINGS) as journal:
        for group in GROUPS[journal.groups :]:
            journal.commit(group)


@pytest.mark.parametrize("name", NAMES)
def test_groups_follow_one_another(name: str, tmp_path: Path) -> None:
    path = tmp_path / "deep" / name
    with Journal(path, SETTINGS) as journal:
        journal.commit(GROUPS[0])
        assert (journal.groups, journal.rows) == (1, 2)
    with Journal(path, SETTINGS) as journal:
        assert (journal.groups, journal.rows) == (1, 2)
    write_rest(path)
    assert written(path) == [0, 1, 2, 3, 4, 5]
    assert sorted(file.name for file in path.parent.iterdir()) == [name, name + ".progress"]


def test_a_part_of_the_next_group_is_kept_until_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with Journal(path, SETTINGS) as journal:
        journal.commit(GROUPS[0])
        journal.keep({3: [{"n": 9}], 10: []})
    assert written(path) == [0, 1]
    with Journal(path, SETTINGS) as journal:
        assert journal.kept == {3: [{"n": 9}], 10: []}
        journal.commit(GROUPS[2])
        assert journal.kept == {}
    with Journal(path, SETTINGS) as journal:
        assert journal.kept == {}
        assert journal.rows == 3


class Killed(BaseException):
    """Ends everything at once, like a signal that cannot be caught."""


def dying(function: Callable[..., Any], calls: list[int], at: int) -> Callable[..., Any]:
    """The function, until the call when the process dies."""

    def call(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            raise Killed
        return function(*arguments, **options)

    return call


def torn(function: Callable[..., int]) -> Callable[..., int]:
    """Writes a few bytes at most, as a disk may at any time."""
    return lambda file, data, offset: function(file, data[:25], offset)


@pytest.mark.parametrize("name", NAMES)
def test_killed_at_any_system_call(name: str, tmp_path: Path) -> None:
    """The same bytes as without interruption, whichever call was the last."""
    write_rest(tmp_path / "whole" / name)
    whole = (tmp_path / "whole" / name).read_bytes()
    for at in range(1, 200):
        path = tmp_path / str(at) / name
        calls: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            for call in ("pwrite", "fsync", "ftruncate"):
                real = getattr(os, call)
                real = torn(real) if call == "pwrite" else real
                patch.setattr(os, call, dying(real, calls, at))
            patch.setattr(Path, "replace", dying(Path.replace, calls, at))
            try:
                write_rest(path)
            except Killed:
                finished = False
            else:
                finished = True
        write_rest(path)
        assert path.read_bytes() == whole, at
        if finished:
            break
    assert finished
    assert at > 20


def full(*_: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_full_disk(call: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with Journal(path, SETTINGS) as journal:
        journal.commit(GROUPS[0])
        before = path.read_bytes()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(TrainingError, match=r"No space left.*2 rows.*run the same command"):
                journal.commit(GROUPS[2])
        assert path.read_bytes() == before
        assert {file.name for file in tmp_path.iterdir()} == {path.name, f"{path.name}.progress"}
    write_rest(path)
    assert written(path) == [0, 1, 2, 3, 4, 5]


def test_a_disk_that_is_full_from_the_start(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(TrainingError, match="No space left"):
            Journal(tmp_path / "rows.jsonl", SETTINGS)
    write_rest(tmp_path / "rows.jsonl")


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="Cannot write"):
        Journal(tmp_path / "file" / "rows.jsonl", SETTINGS)


def test_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rest(path)
    before = path.read_bytes()
    with pytest.raises(InputError, match="model='tiny', now it is 'other'"):
        Journal(path, {**SETTINGS, "model": "other"})
    assert path.read_bytes() == before


def test_foreign_and_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("mine\n")
    with pytest.raises(InputError, match="not written by this command"):
        Journal(path, SETTINGS)
    assert path.read_text() == "mine\n"
    path.unlink()
    write_rest(path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DataError, match="Restore it"):
        Journal(path, SETTINGS)
    for damaged in ("{", "[" * 99_999):
        (tmp_path / "rows.jsonl.progress").write_text(damaged)
        with pytest.raises(DataError, match="Delete it"):
            Journal(path, SETTINGS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "damage",
    [lambda data: bytes(len(data)), lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:]],
    ids=["zeros", "one bit"],
)
def test_changed_files_are_refused(
    damage: Callable[[bytes], bytes], name: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    write_rest(path)
    for file in (path, tmp_path / f"{name}.progress"):
        whole = file.read_bytes()
        file.write_bytes(damage(whole))
        with pytest.raises(DataError, match=r"not as it was written|is damaged"):
            Journal(path, SETTINGS)
        file.write_bytes(whole)
    write_rest(path)
    assert written(path) == [0, 1, 2, 3, 4, 5]


def test_numbers_of_another_run_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rest(path)
    progress = tmp_path / "rows.jsonl.progress"
    changed = progress.read_text().replace('"groups":4', '"groups":9')
    progress.write_text(changed)
    with pytest.raises(DataError, match="is damaged"):
        Journal(path, SETTINGS)


def test_one_process_writes(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with Journal(path, SETTINGS), pytest.raises(InputError, match="another process"):
        Journal(path, SETTINGS)
    write_rest(path)
