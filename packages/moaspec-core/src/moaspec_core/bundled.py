"""Drafters that are installed, in packages that register them."""

from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

GROUP = "moaspec.drafters"
"""Entry points that name packages with a directory for each drafter."""


def bundled_drafters() -> dict[str, Path]:
    """Installed drafters, by the alias of their target."""
    return {
        config.parent.name: config.parent
        for point in entry_points(group=GROUP)
        for folder in _folders(point.module)
        for config in sorted(folder.glob("*/config.json"))
    }


def _folders(package: str) -> list[Path]:
    """Where a package is; it is not imported."""
    spec = find_spec(package)
    return [] if spec is None else list(map(Path, spec.submodule_search_locations or ()))
