"""A cache of the target's activations on disk, filled on first use.

The frozen target gives the same keys, values and states for an example in every epoch; reading them
back costs a fraction of computing them. The files are flat arrays of bf16 numbers.

Legend: T tokens, L layers, K one layer's key and value, E hidden size.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moaspec.errors import TrainingError
from moaspec.model.config import TargetIdentity
from moaspec.model.drafter import TargetPass
from moaspec.target import Target
from moaspec.train.data import Batch, Example


class ActivationCache:
    """Target activations of a fixed list of examples.

    Args:
        directory: where the files live; each list of examples and target has a folder
            in it, which later runs on the same ones reuse.
        examples: the examples, in an order that does not change.
        identity: the target, for the sizes.

    Raises:
        TrainingError: the disk has too little room; the message says how much is needed.
    """

    def __init__(
        self, directory: Path, examples: Sequence[Example], identity: TargetIdentity
    ) -> None:
        directory = directory / _fingerprint(examples, identity)
        directory.mkdir(parents=True, exist_ok=True)
        lengths = np.array([len(example) for example in examples])
        self._ends = lengths.cumsum()
        self._starts = self._ends - lengths
        tokens = int(self._ends[-1])
        self._kv_shape = (identity.num_layers, identity.kv_size)
        widths = _widths(identity)
        self._require_room(directory, tokens * bytes_per_token(identity))
        self._files = {
            name: _flat_file(directory / f"{name}-{tokens}x{width}.bf16", (tokens, width))
            for name, width in widths.items()
        }
        self._done = np.memmap(
            _sized(directory / f"done-{len(examples)}.bool", len(examples)),
            dtype=np.bool_,
            mode="r+",
        )

    @staticmethod
    def _require_room(directory: Path, num_bytes: int) -> None:
        held = sum(file.stat().st_blocks * 512 for file in directory.glob("*.bf16"))
        free = shutil.disk_usage(directory).free + held
        if free < num_bytes * 1.02:
            raise TrainingError(
                f"The activation cache needs {num_bytes / 1e9:.1f} GB in {directory}, "
                f"{free / 1e9:.1f} GB are free. Free some space, use fewer examples or train "
                "with activation_cache=false."
            )

    def passes(self, target: Target, batch: Batch) -> TargetPass:
        """The batch's activations, read back or computed and stored: bf16, pads are zero."""
        if not all(self._done[i] for i in batch.example_ids):
            self._store(batch, target.encode(batch.input_ids_BT, batch.attention_mask_BT))
        kv = [self._read("kv", i).unflatten(1, self._kv_shape) for i in batch.example_ids]
        hidden = [self._read("hidden", i) for i in batch.example_ids]
        pad = torch.nn.utils.rnn.pad_sequence
        return TargetPass(pad(kv, batch_first=True), pad(hidden, batch_first=True))

    def _store(self, batch: Batch, result: TargetPass) -> None:
        for row, example in enumerate(batch.example_ids):
            span = slice(self._starts[example], self._ends[example])
            length = span.stop - span.start
            for name, tensor in (("kv", result.kv_BTLK), ("hidden", result.hidden_BTE)):
                flat = tensor[row, :length].flatten(1).to(torch.bfloat16).contiguous()
                self._files[name][span] = flat.view(torch.int16).numpy()
            self._done[example] = True

    def _read(self, name: str, example: int) -> Tensor:
        flat = np.array(self._files[name][self._starts[example] : self._ends[example]])
        return torch.from_numpy(flat).view(torch.bfloat16)


def bytes_per_token(identity: TargetIdentity) -> int:
    """What the cache of one token takes on disk."""
    return 2 * sum(_widths(identity).values())


def _widths(identity: TargetIdentity) -> dict[str, int]:
    """Numbers of one token in each file."""
    return {"kv": identity.num_layers * identity.kv_size, "hidden": identity.hidden_size}


def _fingerprint(examples: Sequence[Example], identity: TargetIdentity) -> str:
    """Short name of these examples, in this order, under this target."""
    digest = hashlib.sha256(repr(identity).encode())
    for example in examples:
        digest.update(repr(example.token_ids).encode())
    return digest.hexdigest()[:16]


def _flat_file(path: Path, shape: tuple[int, int]) -> np.memmap:
    _sized(path, 2 * shape[0] * shape[1])
    return np.memmap(path, dtype=np.int16, mode="r+", shape=shape)


def _sized(path: Path, num_bytes: int) -> Path:
    """Create a sparse file of that size, or keep the one that is there."""
    if not path.exists() or path.stat().st_size != num_bytes:
        with path.open("wb") as file:
            file.truncate(num_bytes)
    return path
