"""Reading a checkpoint's directory without its tensors."""

import json
from pathlib import Path
from typing import Any

from moaspec.errors import CheckpointError, CorruptCheckpointError

CONFIG_FILE = "config.json"
DEVICE_SECTION = "moaspec_device"  # the section of a config that marks a device bundle
BASELINE_SECTION = "moaspec_baseline"  # marks a baseline drafter
MAX_JSON_BYTES = 16 * 2**20
"""Largest JSON file that is read; as Python objects it may take 30 times as much."""


def is_directory(path: Path) -> bool:
    """Whether a path is a directory; False if the path is too long."""
    try:
        return path.is_dir()
    except OSError:
        return False


def read_json(path: Path) -> Any:
    """The value of a JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: no JSON, or over `MAX_JSON_BYTES`.
        RecursionError: it nests too deeply.
    """
    with path.open("rb") as file:
        content = file.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(f"it is larger than {MAX_JSON_BYTES} bytes")
    return json.loads(content.decode())


def read_config(directory: str | Path) -> dict[str, Any]:
    """The checkpoint's `config.json`.

    Raises:
        CheckpointError: no such file.
        CorruptCheckpointError: it is not a JSON object.
    """
    path = Path(directory) / CONFIG_FILE
    try:
        config = read_json(path)
    except FileNotFoundError as error:
        trained = Path(directory) / "drafter"  # in the output of a training run
        hint = f" Did you mean {trained}?" if (trained / CONFIG_FILE).is_file() else ""
        raise CheckpointError(
            f"No drafter checkpoint at {directory}: {path} is missing.{hint}"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"Cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise CorruptCheckpointError(f"{path} must hold a JSON object.")
    return config
