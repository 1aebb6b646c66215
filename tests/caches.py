"""Cache directories of a test's own."""

from __future__ import annotations

import contextlib
from pathlib import Path

from moaspec_core.support.paths import cache_dir, make_private


def new_cache(directory: Path) -> Path:
    """A cache that is empty but for the compiled kernels, which take long to make again."""
    kernels = (cache_dir() / "kernels").resolve()
    make_private(directory)
    with contextlib.suppress(OSError):  # a read-only home: they are compiled in here
        make_private(kernels)
        (directory / "kernels").symlink_to(kernels)
    return directory
