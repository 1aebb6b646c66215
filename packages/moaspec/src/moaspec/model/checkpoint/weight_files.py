"""The files of a checkpoint: `config.json` and tensors in safetensors, one file or shards."""

import errno
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from moaspec.model.checkpoint.tensor_names import PROJECTION
from moaspec_core.checkpoint.directory import CONFIG_FILE
from moaspec_core.checkpoint.dtypes import STORED_DTYPES
from moaspec_core.checkpoint.user_files import read_json, why_not_tensors
from moaspec_core.errors import CheckpointError, CorruptCheckpointError, InputError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
WEIGHT_DTYPES = tuple(getattr(torch, name) for name in STORED_DTYPES)


def write_config(directory: Path, config: Mapping[str, Any]) -> None:
    """Write `config.json`, replacing an existing one atomically."""
    replace_file(directory / CONFIG_FILE, lambda path: path.write_text(_json(config)))


def write_weights(directory: Path, tensors: Mapping[str, Tensor], shard_bytes: int = 0) -> None:
    """Write tensors as `model.safetensors`, or as shards with an index."""
    split = split_torch_state_dict_into_shards(dict(tensors), max_shard_size=shard_bytes or 2**62)
    for name, names in split.filename_to_tensors.items():
        shard = {key: tensors[key] for key in names}
        replace_file(directory / name, partial(save_file, shard, metadata={"format": "pt"}))
    kept = set(split.filename_to_tensors)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        replace_file(directory / INDEX_FILE, lambda path: path.write_text(_json(index)))
        kept.add(INDEX_FILE)
    for old in [*directory.glob("model*.safetensors"), directory / INDEX_FILE]:
        if old.name not in kept:
            old.unlink(missing_ok=True)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file so that a reader finds the old one or the new one, whole.

    Raises:
        OSError: it cannot be written; names the file.
    """
    scratch = path.with_name(f".{path.name}.partial")
    try:
        write(scratch)
        scratch.replace(path)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise OSError(getattr(error, "errno", None) or errno.EIO, reason, str(path)) from error
    finally:
        with suppress(OSError):  # of a path that cannot be written at all
            scratch.unlink()


def read_tensors(directory: str | Path) -> dict[str, Tensor]:
    """All tensors under their published names.

    Raises:
        CheckpointError: no such file.
        CorruptCheckpointError: truncated, not safetensors, or a value is not finite.
    """
    tensors: dict[str, Tensor] = {}
    for path in weight_files(Path(directory)):
        tensors |= _read_file(path)
    return tensors


def weight_files(directory: Path) -> list[Path]:
    """The files of a checkpoint's weights: `model.safetensors`, or the shards of its index.

    Raises:
        CheckpointError: one is missing.
        CorruptCheckpointError: the index cannot be read.
    """
    index, files = directory / INDEX_FILE, [directory / WEIGHTS_FILE]
    if index.exists():
        try:
            names = set(read_json(index)["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptCheckpointError(f"Cannot read {index}: {error}") from error
        # Names only: an index must not lead out of its directory.
        files = [directory / Path(str(name)).name for name in sorted(names)]
    for path in files:
        if not path.exists():
            raise CheckpointError(f"No drafter checkpoint at {directory}: {path} is missing.")
    return files


def require_replaceable(directory: Path) -> None:
    """InputError where a checkpoint would take the place of a model that is no drafter."""
    files = list(directory.glob("model*.safetensors"))
    names: set[str] = set()
    for path in files:
        if why_not_tensors(path) is not None:
            continue
        with suppress(SafetensorError, OSError), safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    if (files or (directory / CONFIG_FILE).exists()) and PROJECTION not in names:
        raise InputError(f"{directory} holds another model; name another directory.")


def require_enough(tensors: Mapping[str, Tensor], make: Callable[[], nn.Module]) -> None:
    """Refuse a module that has more weights than these tensors, before it takes memory.

    Args:
        tensors: all that its weights come from.

    Raises:
        CorruptCheckpointError: the sizes in its config are not those of the tensors.
    """
    with torch.device("meta"):
        wanted = sum(parameter.numel() for parameter in make().parameters())
    given = sum(tensor.numel() for tensor in tensors.values())
    if wanted > given:
        raise CorruptCheckpointError(
            f"The config asks for {wanted} weights, and the tensors have {given}."
        )


def _read_file(path: Path) -> dict[str, Tensor]:
    reason = why_not_tensors(path)
    if reason is not None:
        raise CorruptCheckpointError(
            f"{path} is truncated or not a safetensors file ({reason}). Fetch it again."
        )
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, RuntimeError, ValueError, TypeError) as error:
        raise CorruptCheckpointError(
            f"{path} is truncated or not a safetensors file ({error}). Fetch it again."
        ) from error
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            _check_values(tensor, f"{path}: tensor {name!r}")
    return tensors


def _check_values(tensor: Tensor, what: str) -> None:
    if tensor.dtype not in WEIGHT_DTYPES:
        raise CorruptCheckpointError(
            f"{what} is {tensor.dtype}, and weights must be one of {', '.join(STORED_DTYPES)}. "
            "Convert the checkpoint."
        )
    if not bool(torch.isfinite(tensor).all()):
        raise CorruptCheckpointError(f"{what} has NaN or infinite values.")
