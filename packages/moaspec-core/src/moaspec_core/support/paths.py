"""Where files are kept that can be made again, and whether a place can be written."""

import logging
import os
import shutil
import stat
import tempfile
from functools import cache
from itertools import chain
from pathlib import Path

from moaspec_core.errors import InputError

VARIABLE = "MOASPEC_CACHE"

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_HAS_OWNERS = hasattr(os, "geteuid")
"""Whether owner and mode tell who may write a file. Windows' access lists are not read."""

log = logging.getLogger("moaspec.support.paths")


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


def trusted(*parts: str) -> Path:
    """The path of a cached file or directory that only this user and root can write.

    Cached files are trusted, and compiled kernels are run. Where another user may have written or
    may replace them, a private directory is used instead.

    Args:
        *parts: of its path, below the cache.

    Raises:
        InputError: see `cache_dir`; or there is no directory that only this user can write.
    """
    root = cache_dir()
    path = root.joinpath(*parts)
    reason = why_not_trusted(path, root)
    if reason is None:
        return path
    other = _own().joinpath(*parts)
    reason_there = why_not_trusted(other, _own())
    if reason_there is not None:
        raise InputError(f"Neither {path} ({reason}) nor {other} ({reason_there}) can be trusted.")
    _tell(path, reason, other)
    return other


def why_not_trusted(path: Path, root: Path) -> str | None:
    """Why others may have written a file, or a directory with all in it; None if they cannot.

    On Windows, where home directories are closed to others, always None.

    Args:
        path: need not exist.
        root: it and all directories between are looked at, too. Others must not be able to exchange
            it, but a group may write to the directories above it.
    """
    if not _HAS_OWNERS:
        return None
    between = [
        root,
        *reversed([parent for parent in path.parents if parent.is_relative_to(root)][:-1]),
    ]
    try:
        for place in (one for one in between if one.exists()):
            if not os.access(place, os.R_OK | os.X_OK):
                return f"{place} is not readable"
        found = [one for one in between if one.exists()] + _below(path)
        reasons = chain(map(_why_not_private, found), map(_why_replaceable, _above(root, found)))
        return next(filter(None, reasons), None)
    except OSError as error:
        return str(error)


def _below(path: Path) -> list[Path]:
    """A file, or a directory and all in it; nothing where there is none."""
    if not os.path.lexists(path):
        return []
    return [path, *path.rglob("*")]


def _above(root: Path, found: list[Path]) -> set[Path]:
    """Directories above the root, and above what links lead to."""
    linked = (one.resolve().parents for one in found if one.is_symlink())
    return {*root.absolute().parents, *root.resolve().parents, *chain.from_iterable(linked)}


def _why_not_private(path: Path) -> str | None:
    status = path.stat()
    if status.st_uid not in {os.geteuid(), 0}:
        return f"{path} belongs to another user"
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        return f"{path} is neither a file nor a directory"
    if status.st_mode & _OTHERS_WRITE and not _is_sticky(status):
        return f"others may write {path}; chmod -R go-w closes it"
    return None


def _why_replaceable(directory: Path) -> str | None:
    """Why others may exchange what is in a directory; None if nothing can be in it."""
    if not directory.is_dir():
        return None
    status = directory.stat()
    # In a user namespace, root may appear as another user; `/` is always root's.
    if status.st_uid not in {os.geteuid(), 0, Path("/").stat().st_uid}:
        return f"{directory} belongs to another user"
    if status.st_mode & stat.S_IWOTH and not _is_sticky(status):
        return f"others may write {directory}; chmod o-w closes it"
    return None


def _is_sticky(status: os.stat_result) -> bool:
    """Whether it is a directory where only the owner of a file can replace it."""
    return bool(stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX)


def make_private(directory: Path) -> None:
    """Make a directory, and those above it that are missing, for this user alone."""
    for place in (*reversed(directory.parents), directory):
        if not place.is_dir():
            place.mkdir(mode=0o700, exist_ok=True)


def close_to_others(path: Path) -> None:
    """Take the right to write a file, or a directory and all in it, from all but this user."""
    for place in (path, *path.rglob("*")):
        if not place.is_symlink():
            place.chmod(place.stat().st_mode & ~_OTHERS_WRITE)


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
    """InputError, before hours of work, for a directory that can neither be written nor made."""
    _refuse(option, path, why_not_writable(path))


def require_writable_file(option: str, path: Path) -> None:
    """InputError, before hours of work, for a file that can neither be written nor made."""
    reason = why_not_writable(path.parent)
    if path.is_dir():
        reason = "it is a directory"
    elif path.exists() and not path.is_file():
        reason = "it is no regular file"
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
    if not path.is_dir():  # an existing directory may be read-only, and filled
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
def _tell(path: Path, reason: str, other: Path) -> None:
    log.warning("%s is not used (%s); %s is, instead.", path, reason, other)


@cache
def _temporary(default: Path | None) -> Path:
    reason = "there is no home directory" if default is None else why_not_writable(default)
    path = _own(reason)
    log.warning("The cache is %s (%s); $%s names another.", path, reason, VARIABLE)
    return path


def _own(reason: str | None = "the one that is set cannot be trusted") -> Path:
    """A directory for temporary files that only this user can write. InputError: there is none."""
    path = Path(tempfile.gettempdir()) / (f"moaspec-{os.getuid()}" if _HAS_OWNERS else "moaspec")
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
        closed = not _HAS_OWNERS or (status.st_uid == os.getuid() and status.st_mode & 0o077 == 0)
    except OSError as error:
        raise InputError(f"No cache directory ({reason}; {error}): set ${VARIABLE}.") from error
    if not closed or why_not_writable(path) is not None:
        raise InputError(f"No cache directory ({reason}; {path} is not private): set ${VARIABLE}.")
    return path
