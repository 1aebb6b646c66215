"""States on disk: whole or not there at all, in files of a chosen size."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from moaspec_core.errors import TrainingError
from moaspec_train.training_state import StateFiles

TENSORS = {
    "model.a": torch.arange(1000.0).view(100, 10),
    "model.b": torch.arange(7, dtype=torch.bfloat16),
    "optimizer.step.a": torch.tensor(3.0),
}
HEADER_BYTES = 400
"""A safetensors file begins with names and places of its tensors."""


@pytest.mark.parametrize("limit", [0, 50, 1000, 4000, 10**9])
def test_round_trip_in_files_of_a_chosen_size(limit: int, tmp_path: Path) -> None:
    files = StateFiles(tmp_path, limit)
    files.save(4, TENSORS, {"step": 4})
    loaded = StateFiles(tmp_path).load()
    assert loaded is not None
    tensors, values = loaded
    assert values["step"] == 4
    assert set(tensors) == set(TENSORS)
    for name, tensor in tensors.items():
        assert_close(tensor, TENSORS[name], rtol=0, atol=0)
    sizes = [path.stat().st_size for path in tmp_path.rglob("*.safetensors")]
    assert not limit or max(sizes) <= limit + HEADER_BYTES
    assert (len(sizes) == 1) == (limit in (0, 10**9))


def test_only_the_newest_stays(tmp_path: Path) -> None:
    files = StateFiles(tmp_path)
    assert files.load() is None
    for step in (9, 10, 11):
        files.save(step, TENSORS, {"step": step})
    assert [path.name for path in tmp_path.iterdir()] == ["step-11"]


def test_the_newest_whole_one_counts(tmp_path: Path) -> None:
    """Killed while writing, or before the older state was removed."""
    files = StateFiles(tmp_path)
    files.save(9, TENSORS, {"step": 9})
    shutil.copytree(tmp_path / "step-9", tmp_path / "step-8")
    shutil.copytree(tmp_path / "step-9", tmp_path / "partial")
    latest = files.latest()
    assert latest is not None
    assert latest.name == "step-9"
    files.save(10, TENSORS, {"step": 10})
    assert [path.name for path in tmp_path.iterdir()] == ["step-10"]


def test_a_full_disk_leaves_the_last_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = StateFiles(tmp_path)
    files.save(1, TENSORS, {"step": 1})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("moaspec_train.training_state.write_weights", full)
    with pytest.raises(TrainingError, match="No space left"):
        files.save(2, TENSORS, {"step": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert files.load() is not None


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: bytes(len(data)),
        lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
        lambda _: b"",
    ],
    ids=["cut", "zeros", "one bit", "empty"],
)
def test_damaged_files_are_refused(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    StateFiles(tmp_path, 1000).save(1, TENSORS, {"step": 1, "order": {"queue": [[1, 2]]}})
    files = list((tmp_path / "step-1").iterdir())
    assert len(files) > 4
    for file in files:
        whole = file.read_bytes()
        file.write_bytes(damage(whole))
        with pytest.raises(TrainingError, match="step-1 is damaged"):
            StateFiles(tmp_path).load()
        file.write_bytes(whole)
    assert StateFiles(tmp_path).load() is not None


def test_files_of_another_state_are_refused(tmp_path: Path) -> None:
    StateFiles(tmp_path / "a").save(1, TENSORS, {"step": 1})
    other = {name: tensor + 1 for name, tensor in TENSORS.items()}
    StateFiles(tmp_path / "b").save(1, other, {"step": 1})
    shutil.copy(tmp_path / "b" / "step-1" / "model.safetensors", tmp_path / "a" / "step-1")
    with pytest.raises(TrainingError, match=r"model\.safetensors is not as it was written"):
        StateFiles(tmp_path / "a").load()
