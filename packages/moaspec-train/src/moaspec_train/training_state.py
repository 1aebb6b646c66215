"""State files for an exact resume: tensors in safetensors shards, one JSON file, and checksums.

A state is written to a scratch directory, which is renamed to `step-NUMBER` when it is complete.
States before the last `keep_states` are removed after that, so a complete state exists whenever the
run is killed.
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from moaspec.model.checkpoint.weight_files import weight_files, write_weights
from moaspec_core.checkpoint.user_files import read_json, why_not_tensors
from moaspec_core.errors import CheckpointError, TrainingError
from moaspec_core.support.seals import checksum

STATE_FILE = "state.json"
SUMS_FILE = "checksums.json"


class StateFiles:
    """The last saved states of one run.

    Args:
        shard_bytes: largest file; 0 for no limit.
        keep: number of states.
    """

    def __init__(self, directory: Path, shard_bytes: int = 0, keep: int = 1) -> None:
        self.directory, self._shard_bytes, self._keep = directory, shard_bytes, keep

    def latest(self) -> Path | None:
        found = {int(path.name.removeprefix("step-")): path for path in self._states()}
        return found[max(found)] if found else None

    def sentence(self) -> str:
        """A sentence on the saved state, for messages."""
        latest = self.latest()
        if latest is None:
            return f"Nothing was saved in {self.directory.parent} yet."
        return f"The last saved state, {latest.name} in {self.directory.parent}, is intact."

    def _states(self) -> list[Path]:
        return [path for path in self.directory.glob("step-*") if path.name[5:].isdigit()]

    def save(self, step: int, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
        """Write a state, then remove older ones; TrainingError where it cannot be written."""
        scratch, final = self.directory / "partial", self.directory / f"step-{step}"
        try:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
            write_weights(scratch, dict(_pieces(tensors, self._shard_bytes)), self._shard_bytes)
            (scratch / STATE_FILE).write_text(json.dumps(info))
            sums = {path.name: checksum(path) for path in sorted(scratch.iterdir())}
            (scratch / SUMS_FILE).write_text(json.dumps(sums))
            if final.exists():
                return
            scratch.rename(final)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(scratch, ignore_errors=True)
            raise TrainingError(
                f"Cannot save step {step} in {self.directory}: {error}. What was saved before is "
                "intact: make room and run the same command again."
            ) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        others = [path for path in self._states() if path != final]
        others.sort(key=lambda path: int(path.name.removeprefix("step-")), reverse=True)
        for path in others[self._keep - 1 :]:
            shutil.rmtree(path, ignore_errors=True)

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Read the newest state; None where there is none, TrainingError where it is damaged."""
        path = self.latest()
        if path is None:
            return None
        try:
            _check(path)
            info = read_json(path / STATE_FILE)
            if not isinstance(info, dict) or not info:
                raise ValueError(f"{STATE_FILE} is no object")
            pieces: dict[str, Tensor] = {}
            for file in weight_files(path):
                if (reason := why_not_tensors(file)) is not None:
                    raise ValueError(f"{file.name}: {reason}")
                pieces |= load_file(file)
            return _joined(pieces), info
        except (OSError, ValueError, RecursionError, SafetensorError, CheckpointError) as error:
            raise damaged_state(path, error) from error


def damaged_state(path: Path, error: Exception) -> TrainingError:
    """The error of a state that cannot be read."""
    return TrainingError(
        f"The saved state {path} is damaged ({type(error).__name__}: {error}). Delete it to start "
        "again, or put it back from a copy."
    )


def _check(path: Path) -> None:
    """Refuse a state whose files are not those that were written."""
    sums = json.loads((path / SUMS_FILE).read_text())
    if not isinstance(sums, dict) or STATE_FILE not in sums:
        raise ValueError(f"{SUMS_FILE} does not name the files of a state")
    for name, expected in sums.items():
        if checksum(path / Path(name).name) != expected:
            raise ValueError(f"{name} is not as it was written")


def _pieces(tensors: Mapping[str, Tensor], limit: int) -> Iterator[tuple[str, Tensor]]:
    """Name tensors `NAME@NUMBER`, split along their first axis if they exceed the limit."""
    for name, tensor in tensors.items():
        rows = len(tensor) if tensor.ndim else 1
        parts = min(rows, math.ceil(tensor.nbytes / limit)) if limit else 1
        # safetensors refuses tensors that share memory, such as tied weights.
        chunks = tensor.tensor_split(parts) if parts > 1 else (tensor,)
        for number, chunk in enumerate(chunks):
            yield f"{name}@{number}", chunk.detach().cpu().clone()


def _joined(pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, dict[int, Tensor]] = {}
    for name, tensor in pieces.items():
        base, _, number = name.rpartition("@")
        found.setdefault(base, {})[int(number)] = tensor
    return {
        name: parts[0] if len(parts) == 1 else torch.cat([parts[i] for i in range(len(parts))])
        for name, parts in found.items()
    }
