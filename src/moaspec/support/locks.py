"""One process at a time writes to a file or directory."""

import os

from moaspec.errors import InputError


def claim(file: int, refusal: str) -> None:
    """Lock a file until its descriptor is closed; other processes are refused.

    Does nothing on systems without `flock`.

    Args:
        file: a file open for writing.
        refusal: what to tell the user if another process has it.

    Raises:
        InputError: another process has it.
    """
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(refusal) from error


def claimed(path: str | os.PathLike[str], refusal: str) -> int:
    """Open a file, created if missing, and `claim` it; closing it releases the lock."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        claim(file, refusal)
    except BaseException:
        os.close(file)
        raise
    return file
