"""Activations of the frozen target for training batches, computed or read from disk.

The target computes the same keys, values and states for an example in every epoch, and a frozen LSA
the same means. Reading them from flat files of bf16 costs a fraction of computing them. A file of
checksums says which examples are stored; what does not match its checksum is computed again.

Legend: B batch, T tokens, L target layers, K one layer's key and value, E hidden size.
"""

import copy
import hashlib
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moaspec.backends.fast_drafter import packed_copy
from moaspec.model.moa import TargetEncoder, TargetPass
from moaspec.target.target import Target
from moaspec_core.checkpoint.drafter_config import TargetIdentity
from moaspec_core.errors import TrainingError
from moaspec_train.dataset.examples import Batch, Example, collate
from moaspec_train.progress import reported

log = logging.getLogger("moaspec.students.target_activations")

HASHED_WEIGHTS = 4096
"""Values of each of the target's tensors, at most, that tell one target from another."""


class ExampleStore:
    """Arrays with one row per token of a fixed list of examples.

    Args:
        directory: of the files; created if missing.
        examples: in a fixed order.
        widths: values per token of each named array.
        without: the setting with which a run needs no such store.

    Raises:
        TrainingError: too little disk space; the message says how much is needed.
    """

    def __init__(
        self,
        directory: Path,
        examples: Sequence[Example],
        widths: Mapping[str, int],
        device: torch.device,
        *,
        without: str,
    ) -> None:
        self._directory, self._device = directory, device
        directory.mkdir(parents=True, exist_ok=True)
        lengths = np.array([len(example) for example in examples])
        self._ends = lengths.cumsum()
        self._starts = self._ends - lengths
        tokens = int(self._ends[-1])
        _require_room(directory, tokens * bytes_per_token(widths), without)
        self._files: dict[str, np.memmap] = {}
        for name, width in widths.items():
            path = directory / f"{name}-{tokens}x{width}.bf16"
            _allocate(path, 2 * tokens * width, without)
            self._files[name] = np.memmap(path, np.int16, mode="r+", shape=(tokens, width))
        path = directory / f"sums-{len(examples)}-{'+'.join(widths)}.u32"
        _allocate(path, 4 * len(examples), without)
        self._sums = np.memmap(path, dtype=np.uint32, mode="r+")  # 0: the example is not stored
        self._checked = np.zeros(len(examples), dtype=np.bool_)  # by this process
        self._told = False

    def fetch(self, batch: Batch, compute: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Read all arrays of a batch, (B, T, width) bf16 each; pads are zero.

        Args:
            batch: of the examples.
            compute: called if one of them is not stored; returns every array, (B, T, ...), and
                maybe others.
        """
        if not all(map(self._is_stored, batch.example_ids)):
            self._write(batch, compute())
        return {name: self._read(file, batch) for name, file in self._files.items()}

    def _is_stored(self, i: int) -> bool:
        """Whether an example is there, as it was written; only its first read checks that."""
        if self._checked[i] or not self._sums[i]:
            return bool(self._checked[i])
        self._checked[i] = self._sums[i] == self._sum(i)
        if not self._checked[i] and not self._told:
            log.warning(
                "Kept activations in %s are damaged; they are computed again.", self._directory
            )
            self._told = True
        return bool(self._checked[i])

    def _sum(self, i: int) -> int:
        """A checksum of an example's arrays, not 0."""
        found = 0
        for file in self._files.values():
            found = zlib.crc32(file[self._starts[i] : self._ends[i]].data, found)
        return found or 1

    def _write(self, batch: Batch, arrays_BT: Mapping[str, Tensor]) -> None:
        for name, file in self._files.items():
            tensor = arrays_BT[name].flatten(2).cpu()
            stored = tensor.to(torch.bfloat16).contiguous().view(torch.int16)
            for row, i in enumerate(batch.example_ids):
                start, end = self._starts[i], self._ends[i]
                file[start:end] = stored[row, : end - start].numpy()
        for i in batch.example_ids:
            self._sums[i] = self._sum(i)
            self._checked[i] = True

    def _read(self, file: np.memmap, batch: Batch) -> Tensor:
        rows = [
            torch.from_numpy(np.array(file[self._starts[i] : self._ends[i]])).view(torch.bfloat16)
            for i in batch.example_ids
        ]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self._device)


def bytes_per_token(widths: Mapping[str, int]) -> int:
    """Size of one token's arrays on disk, in bf16."""
    return 2 * sum(widths.values())


def activation_widths(
    identity: TargetIdentity, before: Collection[int] = (), *, finals_only: bool = False
) -> dict[str, int]:
    """Values per token that `TargetActivations` keeps on disk; arguments as there."""
    finals = {"hidden": identity.hidden_size}
    if finals_only:
        return finals
    keys_and_values = {"kv": identity.num_layers * identity.kv_size}
    return keys_and_values | finals | _before_widths(identity, before)


def mean_widths(identity: TargetIdentity, before: Collection[int] = ()) -> dict[str, int]:
    """Values per token that `LayerMeanCache` keeps on disk. `before`: each N > 0."""
    widths = {"mean": identity.kv_size, "hidden": identity.hidden_size}
    if before:
        widths["last"] = max(before) * identity.kv_size
    return widths | _before_widths(identity, before)


def _before_widths(identity: TargetIdentity, before: Collection[int]) -> dict[str, int]:
    return {f"before{n}": identity.hidden_size for n in before}


def target_fingerprint(target: Target) -> str:
    """Hash of the target's shape and of some values of each of its tensors."""
    digest = hashlib.sha256(repr(target.identity).encode())
    for name, parameter in target.model.named_parameters():
        values = parameter.detach().flatten()
        sample = values[:: max(1, len(values) // HASHED_WEIGHTS)]
        digest.update(name.encode() + sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def fingerprint(
    examples: Sequence[Example],
    target: str,
    weights: Mapping[str, Tensor] | None = None,
) -> str:
    """Hash of the examples in this order, the target and the weights.

    Args:
        target: names its weights and their dtype.
    """
    digest = hashlib.sha256(target.encode())
    for example in examples:
        digest.update(repr(example.pieces).encode())
    for name, tensor in (weights or {}).items():
        digest.update(name.encode())
        digest.update(tensor.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _require_room(directory: Path, num_bytes: int, without: str) -> None:
    own = sum(file.stat().st_blocks * 512 for file in directory.glob("*.bf16"))
    free = shutil.disk_usage(directory).free + own
    if free < num_bytes * 1.02:
        raise TrainingError(
            f"Keeping activations needs {num_bytes / 1e9:.1f} GB in {directory}, "
            f"{free / 1e9:.1f} GB are free. Free some space, use fewer examples or train "
            f"with {without}."
        )


def _allocate(path: Path, num_bytes: int, without: str) -> None:
    """Create a file of this size, unless a file of this size exists.

    The space is allocated at once: if the disk fills later, writing to a mapped file kills the
    process.
    """
    if path.exists() and path.stat().st_size == num_bytes:
        return
    try:
        with path.open("wb") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            file.truncate(num_bytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise TrainingError(
            f"Keeping activations needs {num_bytes / 1e9:.3g} GB for {path}: {error}. Free some "
            f"space, use fewer examples or train with {without}."
        ) from error


class TargetActivations:
    """Passes of the target over examples, cached on disk if there is a directory.

    Args:
        examples: of all batches, in a fixed order.
        directory: of the cache; each list of examples and target has a subdirectory. None computes
            activations every time.
        before: each N > 0 for which the states before the last N layers are returned too.
        finals_only: store final states alone, which are all that a baseline reads.

    Raises:
        TrainingError: too little disk space; the message says how much is needed.
    """

    def __init__(
        self,
        target: Target,
        examples: Sequence[Example],
        directory: Path | None,
        before: Sequence[int] = (),
        *,
        finals_only: bool = False,
    ) -> None:
        self.target, self.examples, self.before = target, examples, tuple(before)
        self._store: ExampleStore | None = None
        if directory:
            widths = activation_widths(target.identity, self.before, finals_only=finals_only)
            directory /= fingerprint(examples, self.of_target)
            without = "activation_cache=false"
            self._store = ExampleStore(directory, examples, widths, target.device, without=without)

    @cached_property
    def target_hash(self) -> str:
        """See `target_fingerprint`."""
        return target_fingerprint(self.target)

    @property
    def of_target(self) -> str:
        """Names all of the target that its activations depend on."""
        return f"{self.target_hash} {self.target.dtype}"

    def passes(self, batch: Batch) -> TargetPass:
        """Activations of a batch on the target's device; bf16 with zero pads if cached."""
        found = self._fetch(batch)
        kv_BTLK = found["kv"].unflatten(2, (self.target.num_layers, -1))
        return TargetPass(kv_BTLK, found["hidden"], {n: found[f"before{n}"] for n in self.before})

    def final_states(self, batch: Batch) -> Tensor:
        return self._fetch(batch)["hidden"]

    def sample(self, ids: Sequence[int], tokens: int) -> Iterator[tuple[Batch, TargetPass]]:
        """Batches of one example each, until they have at least `tokens` tokens in total."""
        chosen, seen = list[int](), 0
        for index in ids:
            if seen < tokens:
                chosen.append(index)
                seen += len(self.examples[index])
        lengths = {index: len(self.examples[index]) for index in chosen}
        for index in reported(chosen, "Read", "tokens", seen, lengths.__getitem__):
            batch = collate(self.examples, [index]).to(self.target.device)
            yield batch, self.passes(batch)

    def _fetch(self, batch: Batch) -> dict[str, Tensor]:
        def compute() -> dict[str, Tensor]:
            ids_BT, mask_BT = batch.input_ids_BT, batch.attention_mask_BT
            return _arrays(self.target.capture(ids_BT, mask_BT, self.before))

        return compute() if self._store is None else self._store.fetch(batch, compute)


def _arrays(result: TargetPass) -> dict[str, Tensor]:
    """Activations by their names in a store, (B, T, width) each."""
    before = {f"before{n}": states for n, states in result.before.items()}
    return {"kv": result.kv_BTLK.flatten(2), "hidden": result.hidden_BTE, **before}


class LayerMeanCache:
    """Means over layers of a frozen LSA, computed once per example and kept on disk.

    The target's activations that training reads are stored with them: final states and, with
    N > 0, keys and values of the last N layers and the states before them.

    Args:
        activations: of the target, inputs of LSA.
        encoder: its LSA must not change while this cache is used.
        bf16: compute in bf16, as decoding does, with kernels if available.
    """

    def __init__(
        self,
        activations: TargetActivations,
        encoder: TargetEncoder,
        directory: Path,
        *,
        bf16: bool = False,
    ) -> None:
        self._activations, self._encoder = activations, encoder
        if bf16:
            # Packed layers run a dozen operations over all layers and tokens in one kernel call.
            whole = copy.deepcopy(encoder).bfloat16()
            self._encoder = packed_copy(whole, exact=list(whole.children()))
        identity = activations.target.identity
        weights = encoder.layer_self_attention.state_dict()
        name = fingerprint(activations.examples, activations.of_target, weights)
        self._last = max(activations.before, default=0)
        widths = mean_widths(identity, activations.before)
        directory /= f"{name}-all-bf16" if bf16 else name
        device = activations.target.device
        examples = activations.examples
        self._store = ExampleStore(directory, examples, widths, device, without="frozen_lsa=0")

    def read(self, batch: Batch) -> tuple[Tensor, TargetPass]:
        """Means over layers (B, T, K), and the target's pass with its last N layers only."""
        stored = self._store.fetch(batch, lambda: self._compute(batch))
        found = {name: array.float() for name, array in stored.items()}
        mean_BTK, hidden_BTE = found["mean"], found["hidden"]
        last_BTX = found["last"] if self._last else mean_BTK[..., :0]
        last_BTLK = last_BTX.unflatten(2, (self._last, mean_BTK.shape[-1]))
        before = {n: found[f"before{n}"] for n in self._activations.before}
        return mean_BTK, TargetPass(last_BTLK, hidden_BTE, before)

    @torch.no_grad()
    def _compute(self, batch: Batch) -> dict[str, Tensor]:
        result = self._activations.passes(batch)
        return {
            **_arrays(result),
            "mean": self._encoder.mean_over_layers(result.kv_BTLK),
            "last": result.kv_BTLK[:, :, -self._last :],  # not stored where N is 0
        }
