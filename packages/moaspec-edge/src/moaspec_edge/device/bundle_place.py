"""Writes a device bundle in place of an older one, never over other files."""

import contextlib
import errno
import tempfile
from collections.abc import Iterator
from pathlib import Path

from moaspec_core.checkpoint.directory import CONFIG_FILE, DEVICE_SECTION, read_config
from moaspec_core.errors import InputError
from moaspec_core.support.paths import close_to_others
from moaspec_edge.device_onnx.manifest import is_onnx_bundle

_OCCUPIED = (errno.EEXIST, errno.ENOTEMPTY, errno.EACCES)
"""Errors of a rename onto an existing directory; the last one occurs on Windows."""
_ATTEMPTS = 8


def is_bundle(directory: str | Path) -> bool:
    """Whether a directory holds a device bundle."""
    path = Path(directory)
    return (path / CONFIG_FILE).is_file() and DEVICE_SECTION in read_config(path)


def require_free(directory: Path) -> None:
    """InputError for a file, or a directory that holds other files."""
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file; name a directory for the bundle.")
    known = is_bundle(directory) or is_onnx_bundle(directory)
    if directory.is_dir() and any(directory.iterdir()) and not known:
        raise InputError(
            f"{directory} is not empty and holds no device bundle; name another directory."
        )


@contextlib.contextmanager
def replacing(directory: str | Path) -> Iterator[Path]:
    """Yield a path to make a bundle at, which then takes the place of `directory` in one step.

    An older bundle can be used until then. A killed export leaves a hidden directory beside it,
    which is never read.

    Raises:
        InputError: `directory` holds other files than a bundle.
        OSError: the bundle cannot be written; names a file or the directory.
    """
    directory = Path(directory).resolve()
    require_free(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{directory.name}."
    with tempfile.TemporaryDirectory(prefix=prefix, dir=directory.parent) as scratch:
        made = Path(scratch) / "made"
        with _named(directory):
            yield made
        close_to_others(made)
        _put_in_place(made, directory)


@contextlib.contextmanager
def _named(directory: Path) -> Iterator[None]:
    """Add the directory's name to errors of writing that name no file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:  # a library's own text
            raise
        raise OSError(error.errno, error.strerror, str(directory)) from error


def _put_in_place(made: Path, directory: Path) -> None:
    """Rename `made`, and move an older bundle beside it; of concurrent exports the last wins."""
    for attempt in range(_ATTEMPTS):
        require_free(directory)
        with contextlib.suppress(FileNotFoundError):
            directory.rename(made.with_name(f"old-{attempt}"))
        try:
            made.rename(directory)
        except OSError as error:
            # Another export has created the directory meanwhile.
            if error.errno not in _OCCUPIED or attempt == _ATTEMPTS - 1:
                raise
        else:
            return
