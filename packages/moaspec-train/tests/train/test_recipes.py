"""Training configurations that ship with the package."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from moaspec_core.errors import InputError
from moaspec_train.recipes import recipes, write_recipe
from moaspec_train.run_config import read_train_config


@pytest.mark.parametrize("name", recipes())
def test_a_written_recipe_can_be_read(name: str, tmp_path: Path) -> None:
    path = write_recipe(name, tmp_path)
    assert path == tmp_path / f"{name}.yaml"
    assert read_train_config(path, ["data=[mine.jsonl]"]).output.endswith(name)


def test_every_purpose_is_a_sentence_that_fits_on_a_line() -> None:
    for name, purpose in recipes().items():
        assert purpose.endswith(".")
        assert len(f"{name}: {purpose}") <= 80


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match=r"No space left.*smollm2-135m\.yaml"):
            write_recipe("smollm2-135m", tmp_path)
    assert write_recipe("smollm2-135m", tmp_path).exists()


def test_an_existing_file_stays(tmp_path: Path) -> None:
    mine = tmp_path / "smollm2-135m.yaml"
    mine.write_text("mine")
    with pytest.raises(InputError, match="exists"):
        write_recipe("smollm2-135m", tmp_path)
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("name", ["unknown", "../configs/smollm2-135m", ""])
def test_an_unknown_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="smollm2-135m"):
        write_recipe(name, tmp_path)
