"""One process at a time writes to a file or directory."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from moaspec_core.errors import InputError
from moaspec_core.support.paths import cache_dir, make_private


def claimed(path: str | os.PathLike[str], refusal: str) -> int:
    """Open a file, created if missing, and lock it until its descriptor is closed.

    Systems without `flock` lock nothing.

    Args:
        refusal: what to tell the user if another process has it.

    Raises:
        InputError: another process has it.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        import fcntl
    except ImportError:
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        if isinstance(error, BlockingIOError):
            raise InputError(refusal) from error
        raise
    return file


def waited_for(path: str | os.PathLike[str]) -> int:
    """Lock a file as `claimed` does, as soon as no other process has it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    with contextlib.suppress(ImportError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
    return file


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Refuse an output that another command of this user writes, from that command's start on.

    The lock is a file in the cache, so that a command that fails leaves nothing at the output's
    place. A cache that cannot be written holds none. Locks beside an output, which its writer takes
    later, also refuse other users and machines.

    Args:
        path: a file or directory, which need not exist.

    Raises:
        InputError: another process writes it.
    """
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()
    refusal = f"Another process is writing {path}; wait for it, or name another output."
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            make_private(cache_dir() / "locks")
            stack.callback(os.close, claimed(cache_dir() / "locks" / name, refusal))
        yield
