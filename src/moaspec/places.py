"""Where files are kept that can be made again, and whether a place can be written."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

from moaspec.errors import InputError

VARIABLE = "MOASPEC_CACHE"

log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """`$MOASPEC_CACHE`, else `moaspec` in `$XDG_CACHE_HOME` or `~/.cache`.

    Where that default cannot be written (no home, or a read-only one), a directory in the system's
    directory for temporary files.

    Raises:
        InputError: `$MOASPEC_CACHE` is relative, or no directory and cannot be made.
    """
    asked = os.environ.get(VARIABLE)
    if asked:
        return _asked(Path(asked).expanduser())
    default = _default()
    if default is not None and why_not_writable(default) is None:
        return default
    return _temporary(default)


def why_not_writable(path: Path) -> str | None:
    """Why nothing can be written to a directory, which need not exist yet; None if it can be."""
    existing = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
    if not existing.is_dir():
        return f"{existing} is not a directory"
    # Also false for every user, root among them, where the file system is mounted read-only.
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} is not writable"
    return None


def require_writable(option: str, path: Path) -> None:
    """Refuse a directory, which need not exist yet, before hours of work end in it.

    Raises:
        InputError: names the option and the reason.
    """
    _refuse(option, path, why_not_writable(path))


def require_writable_file(option: str, path: Path) -> None:
    """Refuse a file that cannot be written or made, before hours of work end in it.

    Raises:
        InputError: names the option and the reason.
    """
    reason = why_not_writable(path.parent)
    if path.is_dir():
        reason = "it is a directory"
    elif path.exists() and not os.access(path, os.W_OK):
        reason = "it is read-only"
    _refuse(option, path, reason)


def _refuse(option: str, path: Path, reason: str | None) -> None:
    if reason is not None:
        raise InputError(f"{option} {path} cannot be written: {reason}.")


def require_room(directory: Path, num_bytes: int) -> None:
    """Raise OSError where a directory's disk has less room than this."""
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise OSError(
            f"{directory} has {free / 1e6:.0f} MB of room, and {num_bytes / 1e6:.0f} are needed. "
            f"Make room, or set ${VARIABLE} to a directory elsewhere"
        )


def _asked(path: Path) -> Path:
    if not path.is_absolute():
        raise InputError(f"${VARIABLE} must be an absolute path, got {str(path)!r}.")
    if not path.is_dir():  # one that exists may be read-only, and filled
        require_writable(f"${VARIABLE}", path)
    return path


def _default() -> Path | None:
    """None without a home directory; a relative `$XDG_CACHE_HOME` is ignored, as XDG asks."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if root.is_absolute():
        return root / "moaspec"
    try:
        return Path.home() / ".cache" / "moaspec"
    except RuntimeError:
        return None


@cache
def _temporary(default: Path | None) -> Path:
    """A directory that only this user can write: compiled code is loaded from it."""
    reason = "there is no home directory" if default is None else why_not_writable(default)
    path = Path(tempfile.gettempdir()) / f"moaspec-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        facts = path.lstat()
        private = facts.st_uid == os.getuid() and facts.st_mode & 0o077 == 0
    except OSError as error:
        raise InputError(f"No cache directory ({reason}; {error}): set ${VARIABLE}.") from error
    if not private or why_not_writable(path) is not None:
        raise InputError(f"No cache directory ({reason}; {path} is not private): set ${VARIABLE}.")
    log.warning("The cache is %s (%s); $%s names another.", path, reason, VARIABLE)
    return path
