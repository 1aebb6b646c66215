"""Activations on the device: decodes records, and keeps those of prompts on disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from moaspec.engine.position_rules import PositionRules
from moaspec.remote.device.draft_ahead import AheadDrafter
from moaspec.remote.device.prefix_cache import BLOCK_TOKENS, PrefixStore
from moaspec.remote.protocol.activation_layout import ActivationLayout
from moaspec.remote.protocol.codec import Bytes


class DeviceActivations:
    """Decodes activations into a drafter.

    Args:
        layout: of records.
        ahead: the drafter.
        target: gives the dtype and device of tensors.
        rules: of the target's positions.
        store: keeps activations of prompts; None keeps none.
    """

    def __init__(
        self,
        layout: ActivationLayout,
        ahead: AheadDrafter,
        target: Any,
        rules: PositionRules,
        store: PrefixStore | None,
    ) -> None:
        self._layout, self._ahead, self._rules, self._store = layout, ahead, rules, store
        self._like = torch.empty(0, dtype=target.dtype, device=target.device)
        self._records: Bytes = np.zeros((0, layout.token_bytes), np.uint8)

    def place(self, start: int, data: bytes, count: int) -> None:
        """Take over `count` records, the first of position `start`.

        Raises:
            WireError: `data` has not the size of `count` records.
        """
        parts = self._layout.decode(data, count, self._like)
        if self._store is not None:
            self._keep(start, np.frombuffer(data, np.uint8).reshape(count, -1))
        self._ahead.place(start, parts)

    def _keep(self, start: int, fresh: Bytes) -> None:
        stop = start + len(fresh)
        if stop > len(self._records):
            grown = np.zeros((max(stop, 2 * len(self._records)), fresh.shape[1]), np.uint8)
            grown[: len(self._records)] = self._records
            self._records = grown
        self._records[start:stop] = fresh

    def restore(self, prompt: Sequence[int]) -> None:
        """Load the activations of a prompt's beginning from disk."""
        if self._store is None:
            return
        held = self._held(len(prompt))
        # The activations of the newest token come with its verdict, so it is never on disk.
        for start, data in self._store.load(prompt[:-1], self._rules.key_version(len(prompt))):
            if start >= held:
                self.place(start, data, BLOCK_TOKENS)

    def save(self, text: Sequence[int], length: int) -> None:
        """Save activations of the first `length` tokens, up to the first gap."""
        if self._store is not None and self._rules.keeps_keys(length, len(text)):
            whole = text[: self._held(length)]
            self._store.save(whole, self._records, self._rules.key_version(length))

    def _held(self, length: int) -> int:
        """Number of the first tokens, of `length`, without a gap."""
        return next(self._ahead.held.gaps(length), (length, length))[0]
