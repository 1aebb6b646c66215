"""Where files are kept that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$MOASPEC_CACHE`, else `~/.cache/moaspec`."""
    root = os.environ.get("MOASPEC_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "moaspec"
