"""Where files are kept that can be made again, and whether a place can be written."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from moaspec_core.errors import InputError
from moaspec_core.support import paths
from moaspec_core.support.paths import (
    cache_dir,
    close_to_others,
    make_private,
    require_writable,
    require_writable_file,
    trusted,
)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home directory, and a directory for temporary files, of this test alone."""
    for name in ("MOASPEC_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    paths._temporary.cache_clear()
    paths._tell.cache_clear()
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
    below = tmp_path / "file" / "below.json"
    for file in (tmp_path, below, Path("/dev/null/none.json"), Path("/dev/null")):
        with pytest.raises(InputError, match="--out"):
            require_writable_file("--out", file)


# Trust


def _open_to_all(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o022)


def _foreign(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, 12345, 12345)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file in a cache that is named by the environment."""
    monkeypatch.setenv("MOASPEC_CACHE", str(tmp_path / "shared"))
    path = trusted("kernels", "made", "file")
    make_private(path.parent)
    path.write_text("content")
    path.chmod(0o600)
    assert trusted("kernels", "made", "file") == path
    assert trusted("kernels", "made") == path.parent
    return path


@pytest.mark.parametrize("harm", [_open_to_all, _foreign])
@pytest.mark.parametrize("above", [0, 1, 2, 3])
def test_what_others_may_have_written_is_not_used(
    harm: Callable[[Path], None], above: int, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    harm([kept, *kept.parents][above])
    with caplog.at_level(logging.WARNING):
        for parts in (("kernels", "made", "file"), ("kernels", "made")):
            instead = trusted(*parts)
            assert trusted(*parts) == instead
            assert instead.is_relative_to(tempfile.gettempdir())
            assert not instead.exists()
    assert len(caplog.records) == 2  # one for each path, however often it is asked for
    assert all("is not used" in record.getMessage() for record in caplog.records)


def test_what_is_planted_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a directory such as /tmp, where everybody may make files."""
    monkeypatch.setenv("MOASPEC_CACHE", str(tmp_path))
    tmp_path.chmod(0o1777)
    assert trusted("kernels", "file") == tmp_path / "kernels" / "file"
    (tmp_path / "kernels").mkdir()
    _foreign(tmp_path / "kernels")
    assert trusted("kernels", "file").is_relative_to(tempfile.gettempdir())


def test_a_link_is_followed_to_what_others_may_write(kept: Path, tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    planted.write_text("")
    planted.chmod(0o666)
    kept.unlink()
    kept.symlink_to(planted)
    assert trusted("kernels", "made", "file").is_relative_to(tempfile.gettempdir())


def test_what_is_no_file_is_not_used(kept: Path) -> None:
    """Reading a pipe waits for somebody who writes to it."""
    kept.unlink()
    os.mkfifo(kept)
    assert trusted("kernels", "made", "file").is_relative_to(tempfile.gettempdir())


@pytest.mark.parametrize("harm", [lambda path: path.chmod(0o777), _foreign])
def test_a_directory_in_which_others_may_exchange_the_cache(
    harm: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """All in the cache may be this user's own: one of another time, or of another purpose."""
    shared = tmp_path / "shared"
    make_private(shared / "mine")
    (shared / "mine" / "file").write_text("")
    (tmp_path / "link").symlink_to(shared / "mine")
    for name in ("shared/mine", "link"):
        monkeypatch.setenv("MOASPEC_CACHE", str(tmp_path / name))
        assert trusted("file") == tmp_path / name / "file"
    harm(shared)
    for name in ("shared/mine", "link"):
        monkeypatch.setenv("MOASPEC_CACHE", str(tmp_path / name))
        assert trusted("file").is_relative_to(tempfile.gettempdir())


def test_a_link_to_where_others_may_exchange_the_file(kept: Path, tmp_path: Path) -> None:
    shared = tmp_path / "open"
    shared.mkdir()
    (shared / "file").write_text("")
    kept.unlink()
    kept.symlink_to(shared / "file")
    assert trusted("kernels", "made", "file") == kept
    shared.chmod(0o777)
    assert trusted("kernels", "made", "file").is_relative_to(tempfile.gettempdir())


def test_groups_and_sticky_directories_above_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, mode in (("group", 0o775), ("sticky", 0o1777)):
        make_private(tmp_path / name / "mine")
        (tmp_path / name).chmod(mode)
        monkeypatch.setenv("MOASPEC_CACHE", str(tmp_path / name / "mine"))
        assert trusted("file") == tmp_path / name / "mine" / "file"


def test_directories_are_made_for_this_user_alone(kept: Path, tmp_path: Path) -> None:
    for directory in (kept.parent, kept.parent.parent, tmp_path / "shared"):
        assert directory.stat().st_mode & 0o777 == 0o700


def test_all_of_a_directory_is_closed(kept: Path) -> None:
    for path in (kept, kept.parent):
        _open_to_all(path)
    close_to_others(kept.parent)
    assert trusted("kernels", "made") == kept.parent


def test_nowhere_to_go(kept: Path) -> None:
    _open_to_all(kept)
    other = trusted("kernels", "made", "file")
    make_private(other.parent)
    other.write_text("")
    _open_to_all(other)
    with pytest.raises(InputError, match="Neither"):
        trusted("kernels", "made", "file")
