"""Arrays of texts on disk, one row per token, found by the text's tokens.

A directory has sets. A set belongs to one target and one frozen LSA, which are known by what they
compute for a few tokens (`probe.safetensors`): a process whose own probe is within `TOLERANCE`
reads and adds, also in another dtype. A set consists of parts, pairs of files to which one
process at a time appends: `NUMBER.data` has texts one after another, `NUMBER.index` an `ENTRY` for
each. A text that does not match its checksum counts as missing.

Legend: P tokens of the probe, T tokens of a text.
"""

import hashlib
import itertools
import json
import logging
import math
import os
import shutil
import struct
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moaspec_core.errors import InputError, TrainingError
from moaspec_core.support.locks import claimed
from moaspec_train.dataset.examples import Tokens

log = logging.getLogger("moaspec.text_store")

ENTRY = struct.Struct("<16sQII")  # key, first byte, tokens, checksum
PROBE = "probe.safetensors"
TOLERANCE = 0.03
"""Largest difference, relative to a token's state, between what one target computes in two dtypes
or by two kernels (0.015 was seen); the median over the probe's tokens counts."""


@dataclass(frozen=True)
class _Entry:
    data: Path
    start: int
    tokens: int
    checksum: int


class TextStore:
    """One set of a directory.

    Args:
        directory: of the set.
        widths: values per token of each named array.
    """

    def __init__(self, directory: Path, widths: Mapping[str, int]) -> None:
        self.directory, self._widths = directory, widths
        self._entries: dict[bytes, list[_Entry]] = {}  # of a text stored twice, one may be damaged
        self._checked: set[_Entry] = set()  # by this process
        self._read: dict[Path, int] = {}  # bytes of each index
        self._part: _Part | None = None
        self._told = False
        self._refresh()

    @classmethod
    def open(
        cls, directory: Path, probe: Mapping[str, Tensor], identity: Mapping[str, Any]
    ) -> "TextStore":
        """The set of a directory whose probe is like this one; it is made if there is none.

        Args:
            probe: arrays of the probe's tokens, (P, width) each.
            identity: of the target, as JSON.

        Raises:
            TrainingError: the directory cannot be written.
        """
        widths = {name: array.shape[1] for name, array in probe.items()}
        about = json.dumps(identity, sort_keys=True)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            paths = sorted(directory.glob(f"*/{PROBE}"))
            differences = {path: _difference(path, probe, about) for path in paths}
            nearest = min(paths, key=differences.__getitem__, default=None)
            if nearest is not None and differences[nearest] <= TOLERANCE:
                return cls(nearest.parent, widths)
            return cls(_new_set(directory, probe, about), widths)
        except (OSError, SafetensorError) as error:
            raise _unwritable(directory, error) from error

    @property
    def bytes_per_token(self) -> int:
        return bytes_per_token(self._widths)

    def __contains__(self, token_ids: Sequence[int] | Tokens) -> bool:
        return key_of(token_ids) in self._entries

    def require_room(self, texts: Sequence[Tokens], without: str) -> None:
        """Refuse texts for which the disk is too small.

        Args:
            without: the setting with which a run needs no store.

        Raises:
            TrainingError: too little space; the message says how much is needed.
        """
        new = [len(ids) for ids in texts if ids not in self]
        log.info("%d of %d texts are kept in %s", len(texts) - len(new), len(texts), self.directory)
        missing = sum(new) * self.bytes_per_token
        free = shutil.disk_usage(self.directory).free
        if free < missing * 1.02:
            raise TrainingError(
                f"Keeping activations needs {missing / 1e9:.1f} GB more in {self.directory}, "
                f"{free / 1e9:.1f} GB are free. Free some space, use fewer examples or train "
                f"with {without}."
            )

    def get(self, token_ids: Sequence[int] | Tokens) -> dict[str, Tensor] | None:
        """The arrays of a text, (T, width) bf16 each; None if it is not there as it was written."""
        key = key_of(token_ids)
        if key not in self._entries:
            self._refresh()
        entries = self._entries.get(key, [])
        while entries:
            data = self._data(entries[-1], len(token_ids))
            if data:
                # A copy, because tensors of read-only memory make PyTorch warn.
                values = torch.from_numpy(np.frombuffer(data, np.int16).copy())
                return self._arrays(values.view(torch.bfloat16), len(token_ids))
            entries.pop()
            self._tell_damage()
        self._entries.pop(key, None)
        return None

    def put(
        self, token_ids: Sequence[int] | Tokens, arrays: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Append a text.

        Args:
            arrays: (T, ...) each, one row per token; others than those of the store are ignored.

        Returns:
            What `get` returns from now on.

        Raises:
            TrainingError: the set cannot be written, as when the disk is full.
        """
        key = key_of(token_ids)
        tensors = [
            arrays[name].reshape(len(token_ids), width).to(torch.bfloat16).cpu().contiguous()
            for name, width in self._widths.items()
        ]
        data = b"".join(tensor.view(torch.int16).numpy().tobytes() for tensor in tensors)
        try:
            if self._part is None:
                self._part = _Part(self.directory)
            entry = self._part.append(key, data, len(token_ids))
        except OSError as error:
            self._part = None  # opened again, it begins behind the last whole entry
            raise _unwritable(self.directory, error) from error
        self._entries.setdefault(key, []).append(entry)
        self._checked.add(entry)
        return dict(zip(self._widths, tensors, strict=True))

    def _arrays(self, values: Tensor, tokens: int) -> dict[str, Tensor]:
        sizes = [tokens * width for width in self._widths.values()]
        named = zip(self._widths.items(), values.split(sizes), strict=True)
        return {name: array.view(-1, width) for (name, width), array in named}

    def _data(self, entry: _Entry, tokens: int) -> bytes:
        """The bytes of a text; none if they are not as they were written."""
        size = tokens * self.bytes_per_token
        try:
            with entry.data.open("rb") as file:
                file.seek(entry.start)
                data = file.read(size) if entry.tokens == tokens else b""
        except (OSError, OverflowError):
            return b""
        if len(data) < size or (entry not in self._checked and zlib.crc32(data) != entry.checksum):
            return b""
        self._checked.add(entry)
        return data

    def _tell_damage(self) -> None:
        if not self._told:
            log.warning(
                "Kept activations in %s are damaged; they are computed again.", self.directory
            )
            self._told = True

    def _refresh(self) -> None:
        """Read what other processes have added to the indexes."""
        for path in sorted(self.directory.glob("*.index")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = len(data) - len(data) % ENTRY.size
            self._read[path] = self._read.get(path, 0) + whole
            for key, *about in ENTRY.iter_unpack(data[:whole]):
                entry = _Entry(path.with_suffix(".data"), *about)
                if entry not in self._checked:  # that which this process wrote
                    self._entries.setdefault(key, []).append(entry)


class _Part:
    """Two files to which this process alone appends."""

    def __init__(self, directory: Path) -> None:
        lock, self._index = _claimed_part(directory)
        weakref.finalize(self, os.close, lock)
        self._data = self._index.with_suffix(".data")
        # A killed process may have left an incomplete entry; data behind the last whole one stays.
        size = self._index.stat().st_size if self._index.exists() else 0
        if size % ENTRY.size:
            os.truncate(self._index, size - size % ENTRY.size)

    def append(self, key: bytes, data: bytes, tokens: int) -> _Entry:
        with self._data.open("ab") as file:
            entry = _Entry(self._data, file.tell(), tokens, zlib.crc32(data))
            file.write(data)
        with self._index.open("ab") as file:
            file.write(ENTRY.pack(key, entry.start, tokens, entry.checksum))
        return entry


def _claimed_part(directory: Path) -> tuple[int, Path]:
    """The first part that no other process writes: its lock, until it is closed, and its index."""
    for number in itertools.count(1):
        try:
            lock = claimed(directory / f"{number:03}.lock", "taken")
        except (InputError, PermissionError):  # another process's, or another user's
            continue
        return lock, directory / f"{number:03}.index"
    raise AssertionError


def key_of(token_ids: Sequence[int] | Tokens) -> bytes:
    """What a text is found by."""
    return hashlib.sha256(np.asarray(token_ids, np.int32).tobytes()).digest()[:16]


def bytes_per_token(widths: Mapping[str, int]) -> int:
    """Size of one token's arrays on disk, in bf16."""
    return 2 * sum(widths.values())


def _difference(path: Path, probe: Mapping[str, Tensor], about: str) -> float:
    """How far a stored probe is from this one; infinite where it is of another kind."""
    try:
        with safe_open(path, "pt") as file:
            if (file.metadata() or {}).get("identity") != about or {*file.keys()} != {*probe}:
                return math.inf
            found = [_relative(file.get_tensor(name), array) for name, array in probe.items()]
            return max(found)
    except (OSError, SafetensorError):
        return math.inf


def _relative(stored: Tensor, array: Tensor) -> float:
    """The median over tokens of the difference's norm over that of the state."""
    stored, array = stored.float(), array.float().cpu()
    if stored.shape != array.shape:
        return math.inf
    differences = (stored - array).norm(dim=1) / array.norm(dim=1).clamp(min=1e-9)
    return float(differences.median())


def _new_set(directory: Path, probe: Mapping[str, Tensor], about: str) -> Path:
    """Processes of one run compute the same probe, so they make the same set."""
    arrays = {name: array.to(torch.bfloat16).cpu().contiguous() for name, array in probe.items()}
    digest = hashlib.sha256(about.encode())
    for name, array in arrays.items():
        digest.update(name.encode() + array.view(torch.int16).numpy().tobytes())
    path = directory / digest.hexdigest()[:16]
    path.mkdir(exist_ok=True)
    scratch = path / f"{PROBE}.{os.getpid()}"
    save_file(arrays, scratch, metadata={"identity": about})
    scratch.chmod(0o644)
    scratch.replace(path / PROBE)
    return path


def _unwritable(directory: Path, error: Exception) -> TrainingError:
    reason = error.strerror if isinstance(error, OSError) else None
    return TrainingError(
        f"Cannot keep activations in {directory}: {reason or error}. What is there stays valid: "
        "make room, or let this user write there, and run the same command again."
    )
