"""Activations of training examples on disk, as flat arrays of bf16.

The frozen target computes the same keys, values and states for an example in every epoch, and a
frozen LSA the same means. Reading them costs a fraction of computing them.

Legend: B batch, T tokens.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moaspec.errors import TrainingError
from moaspec.model.drafter_config import TargetIdentity
from moaspec.train.dataset.examples import Batch, Example


class ExampleStore:
    """Arrays with one row per token of a fixed list of examples.

    Args:
        directory: of the files; created if missing.
        examples: in a fixed order.
        widths: values per token of each named array.
        device: of the tensors that are read.

    Raises:
        TrainingError: too little disk space; the message says how much is needed.
    """

    def __init__(
        self,
        directory: Path,
        examples: Sequence[Example],
        widths: Mapping[str, int],
        device: torch.device,
    ) -> None:
        self._device = device
        directory.mkdir(parents=True, exist_ok=True)
        lengths = np.array([len(example) for example in examples])
        self._ends = lengths.cumsum()
        self._starts = self._ends - lengths
        tokens = int(self._ends[-1])
        _require_room(directory, tokens * 2 * sum(widths.values()))
        self._files = {
            name: _flat_file(directory / f"{name}-{tokens}x{width}.bf16", (tokens, width))
            for name, width in widths.items()
        }
        self._done = np.memmap(
            _sized(directory / f"done-{len(examples)}-{'+'.join(widths)}.bool", len(examples)),
            dtype=np.bool_,
            mode="r+",
        )

    def fetch(self, batch: Batch, compute: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Read all arrays of a batch, (B, T, width) bf16 each; pads are zero.

        Args:
            batch: of the examples.
            compute: called if one of them is not stored; returns every array, (B, T, ...).
        """
        if not all(self._done[i] for i in batch.example_ids):
            self._write(batch, compute())
        return {name: self._read(file, batch) for name, file in self._files.items()}

    def _write(self, batch: Batch, arrays_BT: Mapping[str, Tensor]) -> None:
        for name, tensor in arrays_BT.items():
            stored = tensor.flatten(2).cpu().to(torch.bfloat16).contiguous().view(torch.int16)
            for row, i in enumerate(batch.example_ids):
                start, end = self._starts[i], self._ends[i]
                self._files[name][start:end] = stored[row, : end - start].numpy()
        self._done[list(batch.example_ids)] = True

    def _read(self, file: np.memmap, batch: Batch) -> Tensor:
        rows = [
            torch.from_numpy(np.array(file[self._starts[i] : self._ends[i]])).view(torch.bfloat16)
            for i in batch.example_ids
        ]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self._device)


def bytes_per_token(identity: TargetIdentity) -> int:
    """Size of one token's activations on disk."""
    return 2 * sum(activation_widths(identity).values())


def activation_widths(identity: TargetIdentity) -> dict[str, int]:
    """Values per token of the target's keys and values, and of its final states."""
    return {"kv": identity.num_layers * identity.kv_size, "hidden": identity.hidden_size}


def fingerprint(
    examples: Sequence[Example],
    identity: TargetIdentity,
    weights: Mapping[str, Tensor] | None = None,
) -> str:
    """Hash of the examples in this order, the target and the weights."""
    digest = hashlib.sha256(repr(identity).encode())
    for example in examples:
        digest.update(repr(example.pieces).encode())
    for name, tensor in (weights or {}).items():
        digest.update(name.encode())
        digest.update(tensor.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _require_room(directory: Path, num_bytes: int) -> None:
    held = sum(file.stat().st_blocks * 512 for file in directory.glob("*.bf16"))
    free = shutil.disk_usage(directory).free + held
    if free < num_bytes * 1.02:
        raise TrainingError(
            f"Keeping activations needs {num_bytes / 1e9:.1f} GB in {directory}, "
            f"{free / 1e9:.1f} GB are free. Free some space, use fewer examples or train "
            "with activation_cache=false."
        )


def _flat_file(path: Path, shape: tuple[int, int]) -> np.memmap:
    _sized(path, 2 * shape[0] * shape[1])
    return np.memmap(path, dtype=np.int16, mode="r+", shape=shape)


def _sized(path: Path, num_bytes: int) -> Path:
    """Create a file of this size, unless a file of this size exists.

    The space is allocated at once: if the disk fills later, writing to a mapped file kills the
    process.
    """
    if path.exists() and path.stat().st_size == num_bytes:
        return path
    try:
        with path.open("wb") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            file.truncate(num_bytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise TrainingError(
            f"Keeping activations needs {num_bytes / 1e9:.3g} GB for {path}: {error}. Free some "
            "space, use fewer examples or train with activation_cache=false."
        ) from error
    return path
