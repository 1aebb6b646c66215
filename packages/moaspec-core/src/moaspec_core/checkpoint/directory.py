"""Reading a checkpoint's directory without its tensors."""

from pathlib import Path
from typing import Any

from moaspec_core.checkpoint.user_files import read_json
from moaspec_core.errors import CheckpointError, CorruptCheckpointError

CONFIG_FILE = "config.json"
DEVICE_SECTION = "moaspec_device"  # the section of a config that marks a device bundle
BASELINE_SECTION = "moaspec_baseline"  # marks a baseline drafter


def is_directory(path: Path) -> bool:
    """Whether a path is a directory; False if the path is too long."""
    try:
        return path.is_dir()
    except OSError:
        return False


def is_file(path: Path) -> bool:
    """Whether a path is a file; False if the path is too long."""
    try:
        return path.is_file()
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
