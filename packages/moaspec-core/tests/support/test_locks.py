"""One process at a time writes to an output."""

import subprocess
import sys
from pathlib import Path

import pytest

from moaspec_core.errors import InputError
from moaspec_core.support.locks import writing

pytest.importorskip("fcntl", reason="this system has no flock")
HOLDER = """\
import sys, time
from pathlib import Path
from moaspec_core.support.locks import writing
with writing(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_one_output_however_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    monkeypatch.chdir(tmp_path)
    with writing(tmp_path / "there" / "out"):
        for name in ("there/out", "link/out", "there/../link/out"):
            with pytest.raises(InputError, match=f"writing {name}; wait"), writing(Path(name)):
                pass
        with writing(Path("there/other")):
            pass
    with writing(Path("there/out")):
        assert not list((tmp_path / "there").iterdir())


def test_a_cache_that_is_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands still write."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "locks").write_text("")
    monkeypatch.setenv("MOASPEC_CACHE", str(tmp_path / "cache"))
    with writing(tmp_path / "out"):
        pass


@pytest.mark.slow
def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", HOLDER, str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(InputError, match="Another process"), writing(out):
            pass
        holder.kill()
    with writing(out):
        pass
