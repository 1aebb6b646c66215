"""Arrays of texts on disk, one row per token, found by the text's tokens.

A directory has sets. A set belongs to one target and one frozen LSA, which are known by what they
compute for a few tokens (`probe.safetensors`): whoever computes the same, in whatever dtype, may
read and add. It consists of parts, pairs of files to which one process at a time appends:
`NUMBER.data` has texts one after another, `NUMBER.index` an `ENTRY` for each. A text that does not
match its checksum is not there.

Legend: P tokens of the probe, T tokens of a text.
"""

import hashlib
import itertools
import json
import logging
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

log = logging.getLogger("moaspec.text_store")

ENTRY = struct.Struct("<16sQII")  # key, first byte, tokens, checksum
PROBE = "probe.safetensors"
SAME = 0.05
"""Largest difference, relative to a token's state, between what one target computes in two dtypes
or by two kernels; the median over the probe's tokens counts."""


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
        self._entries: dict[bytes, _Entry] = {}
        self._checked: set[bytes] = set()  # by this process
        self._read: dict[Path, int] = {}  # bytes of each index
        self._part: _Part | None = None
        self._told = False
        self._refresh()

    @classmethod
    def find(
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
            for path in sorted(directory.glob(f"*/{PROBE}")):
                if _is_like(path, probe, about):
                    return cls(path.parent, widths)
            return cls(_new_set(directory, probe, about), widths)
        except OSError as error:
            raise _unwritable(directory, error) from error

    @property
    def bytes_per_token(self) -> int:
        return bytes_per_token(self._widths)

    def __contains__(self, token_ids: Sequence[int]) -> bool:
        return key_of(token_ids) in self._entries

    def require_room(self, texts: Sequence[Sequence[int]], without: str) -> None:
        """Refuse texts for which the disk is too small.

        Args:
            without: what does not need them.

        Raises:
            TrainingError: too little space; the message says how much is needed.
        """
        missing = sum(len(ids) for ids in texts if ids not in self) * self.bytes_per_token
        free = shutil.disk_usage(self.directory).free
        if free < missing * 1.02:
            raise TrainingError(
                f"Keeping activations needs {missing / 1e9:.1f} GB more in {self.directory}, "
                f"{free / 1e9:.1f} GB are free. Free some space, use fewer examples or train "
                f"with {without}."
            )

    def get(self, token_ids: Sequence[int]) -> dict[str, Tensor] | None:
        """The arrays of a text, (T, width) bf16 each; None if it is not there as it was written."""
        key = key_of(token_ids)
        if key not in self._entries:
            self._refresh()
        entry = self._entries.get(key)
        if entry is None:
            return None
        data = self._bytes(entry) if entry.tokens == len(token_ids) else b""
        if key not in self._checked:
            if not data or zlib.crc32(data) != entry.checksum:
                self._forget(key)
                return None
            self._checked.add(key)
        # A copy, because tensors of read-only memory make PyTorch warn.
        values = torch.from_numpy(np.frombuffer(data, np.int16).copy()).view(torch.bfloat16)
        sizes = [entry.tokens * width for width in self._widths.values()]
        arrays = zip(self._widths.items(), values.split(sizes), strict=True)
        return {name: array.view(-1, width) for (name, width), array in arrays}

    def put(self, token_ids: Sequence[int], arrays: Mapping[str, Tensor]) -> None:
        """Append a text.

        Args:
            arrays: (T, ...) each, one row per token; others than those of the store are ignored.

        Raises:
            TrainingError: the disk is full.
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
            raise _unwritable(self.directory, error) from error
        self._entries[key] = entry
        self._checked.add(key)

    def _bytes(self, entry: _Entry) -> bytes:
        try:
            with entry.data.open("rb") as file:
                file.seek(entry.start)
                return file.read(entry.tokens * self.bytes_per_token)
        except OSError:
            return b""

    def _forget(self, key: bytes) -> None:
        del self._entries[key]
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
            for key, start, tokens, checksum in ENTRY.iter_unpack(data[:whole]):
                if key not in self._checked:
                    self._entries[key] = _Entry(path.with_suffix(".data"), start, tokens, checksum)


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
        except InputError:
            continue
        return lock, directory / f"{number:03}.index"
    raise AssertionError


def key_of(token_ids: Sequence[int]) -> bytes:
    """What a text is found by."""
    return hashlib.sha256(np.asarray(token_ids, np.int32).tobytes()).digest()[:16]


def bytes_per_token(widths: Mapping[str, int]) -> int:
    """Size of one token's arrays on disk, in bf16."""
    return 2 * sum(widths.values())


def _is_like(path: Path, probe: Mapping[str, Tensor], about: str) -> bool:
    """Whether a stored probe is of the same target and LSA."""
    try:
        with safe_open(path, "pt") as file:
            if (file.metadata() or {}).get("identity") != about or {*file.keys()} != {*probe}:
                return False
            return all(_close(file.get_tensor(name), array) for name, array in probe.items())
    except (OSError, SafetensorError):
        return False


def _close(stored: Tensor, array: Tensor) -> bool:
    stored, array = stored.float(), array.float().cpu()
    if stored.shape != array.shape:
        return False
    differences = (stored - array).norm(dim=1) / array.norm(dim=1).clamp(min=1e-9)
    return bool(differences.median() <= SAME)


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
    scratch.replace(path / PROBE)
    return path


def _unwritable(directory: Path, error: OSError) -> TrainingError:
    return TrainingError(
        f"Cannot keep activations in {directory}: {error.strerror or error}. What is there stays "
        "valid: make room and run the same command again."
    )
