"""Drafters that ship inside the package."""

import importlib.resources
from pathlib import Path


def bundled_drafters() -> dict[str, Path]:
    """Drafters that ship inside the package, by the alias of their target."""
    root = Path(str(importlib.resources.files("moaspec"))) / "bundled"
    return {path.parent.name: path.parent for path in sorted(root.glob("*/config.json"))}
