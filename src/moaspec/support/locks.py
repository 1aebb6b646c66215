"""One process at a time writes to a file or directory."""

import os

from moaspec.errors import InputError


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
