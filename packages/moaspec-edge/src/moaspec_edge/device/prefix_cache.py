"""Activations that a server sends: decoded into the drafter, those of prompts also kept on disk.

A text is cut into blocks. The name of a block's file is a hash of the text up to the block's end,
the models and the tenant, so only equal prefixes of one tenant share files. Token ids are hashed as
they are sent: private spans are placeholders by then.

If the disk fails, activations come from the server instead.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from moaspec_core.engine.position_rules import PositionRules
from moaspec_core.errors import InputError
from moaspec_core.support.paths import make_private, why_not_trusted
from moaspec_edge.device.draft_ahead import AheadDrafter
from moaspec_edge.protocol.activation_layout import ActivationLayout, written
from moaspec_edge.protocol.codec import Bytes

log = logging.getLogger("moaspec.device.prefix_cache")

BLOCK_TOKENS = 64
CHECKSUM_BYTES = 16  # bytes of SHA-256 at the beginning of a file, over the rest of it


class PrefixStore:
    """Stores blocks of records on disk; a record is the encoded activations of one token.

    Args:
        directory: of all tenants; made if missing.
        tenant: any name; nothing is shared between tenants.
        models: all that activations depend on besides the text: identities, codec, N.
        token_bytes: size of a record.
        max_bytes: of one tenant; the least recently used blocks are removed first.

    Raises:
        InputError: the directory cannot be made or written, or other users may write to it.
    """

    def __init__(
        self,
        directory: Path,
        tenant: str,
        *,
        models: str,
        token_bytes: int,
        max_bytes: int = 1 << 30,
    ) -> None:
        self._seed = hashlib.sha256(f"{tenant}\0{models}".encode()).digest()
        self._directory = Path(directory) / hashlib.sha256(tenant.encode()).hexdigest()[:32]
        self._token_bytes, self._max_bytes = token_bytes, max_bytes
        try:
            # Activations are as private as their text.
            make_private(self._directory)
            reason = why_not_trusted(self._directory / "block", self._directory)
        except OSError as error:
            reason = error.strerror
        if reason is not None:
            raise InputError(
                f"Cannot keep prefixes in {directory}: {reason}. Choose another directory."
            )

    def load(self, token_ids: Sequence[int], regime: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield the blocks of the text's beginning: position of the first token, and records.

        Args:
            token_ids: of the text.
            regime: which of LongRoPE's rotary embeddings the keys have; it depends on the length.
        """
        for start, path in self._blocks(token_ids, regime):
            data = self._read(path)
            if data is None:
                return
            yield start, data

    def save(self, token_ids: Sequence[int], records: Bytes, regime: int = 0) -> None:
        """Save the whole blocks of a text.

        Args:
            token_ids: of the text, one for each record.
            records: (T, `token_bytes`).
            regime: see `load`.
        """
        try:
            for start, path in self._blocks(token_ids, regime):
                # Damaged blocks are replaced; `load` may not have read this one.
                if self._read(path) is None:
                    self._write(path, records[start : start + BLOCK_TOKENS].tobytes())
            self._shrink()
        except OSError as error:
            log.warning("Prefixes are not kept: %s", error.strerror)

    def _blocks(self, token_ids: Sequence[int], regime: int) -> Iterator[tuple[int, Path]]:
        digest = hashlib.sha256(self._seed + bytes([regime]))
        for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            digest.update(np.array(token_ids[start : start + BLOCK_TOKENS], "<u4").tobytes())
            yield start, self._directory / digest.hexdigest()

    def _read(self, path: Path) -> bytes | None:
        """Read a block; None if it is missing or damaged."""
        try:
            if (reason := why_not_trusted(path, self._directory)) is not None:
                log.warning("A prefix is not read, and comes from the server: %s", reason)
                return None
            size = CHECKSUM_BYTES + BLOCK_TOKENS * self._token_bytes
            with path.open("rb") as file:
                content = file.read(size + 1)  # a file of another length may not fit into memory
            data = content[CHECKSUM_BYTES:]
            if len(content) != size or _check(data) != content[:CHECKSUM_BYTES]:
                path.unlink()
                return None
            os.utime(path)
        except OSError:
            return None
        return data

    def _write(self, path: Path, data: bytes) -> None:
        """Write a file atomically: another process may read it at any time."""
        handle, scratch = tempfile.mkstemp(dir=self._directory)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_check(data) + data)
            Path(scratch).replace(path)
        except OSError:
            Path(scratch).unlink(missing_ok=True)
            raise

    def _shrink(self) -> None:
        files = [(path.stat(), path) for path in self._directory.iterdir()]
        total = sum(status.st_size for status, _ in files)
        for status, path in sorted(files, key=lambda one: one[0].st_mtime):
            if total <= self._max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= status.st_size


def _check(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:CHECKSUM_BYTES]


class DeviceActivations:
    """Decodes activations into a drafter, and keeps those of prompts in a store.

    Args:
        store: keeps activations of prompts; None keeps none.
    """

    def __init__(
        self,
        layout: ActivationLayout,
        ahead: AheadDrafter,
        rules: PositionRules,
        store: PrefixStore | None,
    ) -> None:
        self._layout, self._ahead, self._rules, self._store = layout, ahead, rules, store
        self._records: Bytes = np.zeros((0, layout.token_bytes), np.uint8)

    def place(self, start: int, data: bytes, count: int) -> None:
        """Take over `count` records from position `start` on; WireError for other sizes."""
        activations = self._layout.decode(data, count)
        if self._store is not None:
            fresh = np.frombuffer(data, np.uint8).reshape(count, -1)
            self._records = written(self._records, start, fresh)
        self._ahead.place(start, activations)

    def restore(self, prompt: Sequence[int]) -> None:
        """Load the activations of a prompt's beginning from disk."""
        if self._store is None:
            return
        received = self._num_received(len(prompt))
        # The activations of the newest token come with its verdict, so it is never on disk.
        for start, data in self._store.load(prompt[:-1], self._rules.key_version(len(prompt))):
            if start >= received:
                self.place(start, data, BLOCK_TOKENS)

    def save(self, text: Sequence[int], length: int) -> None:
        """Save activations of the first `length` tokens, up to the first gap."""
        if self._store is not None and self._rules.keeps_keys(length, len(text)):
            whole = text[: self._num_received(length)]
            self._store.save(whole, self._records, self._rules.key_version(length))

    def _num_received(self, length: int) -> int:
        """Number of the first tokens, of `length`, without a gap."""
        return next(self._ahead.received.gaps(length), (length, length))[0]
