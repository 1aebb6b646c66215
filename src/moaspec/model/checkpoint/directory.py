"""What can be asked of a checkpoint's directory without its tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moaspec.errors import CheckpointError, CorruptCheckpointError

CONFIG_FILE = "config.json"


def is_directory(path: Path) -> bool:
    """Whether it is one; what is too long for a path is none."""
    try:
        return path.is_dir()
    except OSError:
        return False


def read_config(directory: str | Path) -> dict[str, Any]:
    """The checkpoint's `config.json`.

    Raises:
        CheckpointError: no such file.
        CorruptCheckpointError: it is not a JSON object.
    """
    path = Path(directory) / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"No drafter checkpoint at {directory}: {path} is missing."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"Cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise CorruptCheckpointError(f"{path} must hold a JSON object.")
    return config
