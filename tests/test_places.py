"""Where files are kept that can be made again, and whether a place can be written."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from moaspec import places
from moaspec.errors import InputError
from moaspec.places import cache_dir, require_writable, require_writable_file


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home directory, and a directory for temporary files, of this test alone."""
    for name in ("MOASPEC_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    places._temporary.cache_clear()
    return tmp_path / "home"


def test_the_variable_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("MOASPEC_CACHE", str(tmp_path / "mine"))
    assert cache_dir() == tmp_path / "mine"


def test_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "moaspec"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == home / ".cache" / "moaspec"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_dir() == home / ".cache" / "moaspec"


def test_home(home: Path) -> None:
    assert cache_dir() == home / ".cache" / "moaspec"


@pytest.mark.parametrize(
    "value", ["relative", "./here", "{file}", "{file}/below", "/dev/null/none"]
)
def test_a_bad_variable(value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOASPEC_CACHE", value.format(file=tmp_path / "file"))
    with pytest.raises(InputError, match=r"\$MOASPEC_CACHE"):
        cache_dir()


def _no_home(patch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    patch.setattr(Path, "home", home)


def _read_only_home(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("HOME", "/dev/null")  # nobody can write there, root included


def _file_as_xdg(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("XDG_CACHE_HOME", "/dev/null")


@pytest.mark.parametrize("arrange", [_no_home, _read_only_home, _file_as_xdg])
def test_without_a_home_that_can_be_written(
    arrange: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    arrange(monkeypatch)
    with caplog.at_level(logging.WARNING):
        found = cache_dir()
        assert cache_dir() == found
    assert found.parent == Path(tempfile.gettempdir())
    assert found.stat().st_mode & 0o777 == 0o700
    assert len(caplog.records) == 1
    assert "$MOASPEC_CACHE" in caplog.text


def test_a_temporary_directory_that_others_may_write(monkeypatch: pytest.MonkeyPatch) -> None:
    _read_only_home(monkeypatch)
    planted = Path(tempfile.gettempdir()) / f"moaspec-{os.getuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    with pytest.raises(InputError, match="not private"):
        cache_dir()
    planted.rmdir()
    planted.symlink_to(tempfile.gettempdir())
    with pytest.raises(InputError, match="not private"):
        cache_dir()


def test_outputs_are_refused_early(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    require_writable("--out", tmp_path / "new" / "deep")
    require_writable_file("--out", tmp_path / "new.jsonl")
    require_writable_file("--out", tmp_path / "file")
    for directory in (tmp_path / "file", tmp_path / "file" / "below", Path("/dev/null/none")):
        with pytest.raises(InputError, match="--out"):
            require_writable("--out", directory)
    for file in (tmp_path, tmp_path / "file" / "below.json", Path("/dev/null/none.json")):
        with pytest.raises(InputError, match="--out"):
            require_writable_file("--out", file)
