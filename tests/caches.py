"""Cache directories of a test's own."""

from __future__ import annotations

import contextlib
from pathlib import Path

from moaspec.places import cache_dir


def new_cache(directory: Path) -> Path:
    """A cache that is empty but for the compiled kernels, which take long to make again."""
    kernels = (cache_dir() / "kernels").resolve()
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # a read-only home: they are compiled in here
        kernels.mkdir(parents=True, exist_ok=True)
        (directory / "kernels").symlink_to(kernels)
    return directory
