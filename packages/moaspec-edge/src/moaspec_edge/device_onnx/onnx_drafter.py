"""Drafting by onnxruntime, out of an ONNX bundle; needs numpy and onnxruntime, never PyTorch.

Legend: T tokens, S text slots, M memory slots, C CA's KV heads, N reused layers, H their KV heads,
D head dim, K drafts per run.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from copy import copy
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from moaspec_core.errors import InputError, RefusedError
from moaspec_edge.device_onnx.manifest import GRAPH_FILE, described, read_manifest, text_caches

Floats = NDArray[np.float32]
FIRST_SLOTS = 512
"""Slots of new caches, unless the target has fewer positions."""
MEMORY = ("memory_key", "memory_value")


class Drafts(NamedTuple):
    """The most probable next tokens.

    Attributes:
        token_ids: (K,) int64, of the target's vocabulary, the most probable first.
        log_q: (K,) their log-probabilities.
    """

    token_ids: NDArray[np.int64]
    log_q: Floats


class OnnxDrafter:
    """Drafts tokens one at a time; holds the caches of one text.

    Args:
        directory: an ONNX bundle.
        threads: of onnxruntime.

    Attributes:
        manifest: of the bundle.
        caches: keys and values of SA, CA and reused layers, (heads, slots, D) each, by input of
            the graph.

    Raises:
        CheckpointError: no ONNX bundle, or another version of the format.
        CorruptCheckpointError: a file is missing or has other contents than the manifest says.
    """

    def __init__(self, directory: str | Path, *, threads: int = 1) -> None:
        self.manifest = read_manifest(directory)
        self._graph, self._threads = Path(directory) / GRAPH_FILE, threads
        numbers = range(self.manifest.num_target_layers)
        self._layers = [(f"layer_key_{n}", f"layer_value_{n}") for n in numbers]
        self._text = text_caches(self.manifest.self_attention_layers)
        self._session = self._make_session(str(self._graph))
        self._clear()

    def _make_session(self, graph: str | bytes) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = self._threads, 3
        # On x86 without VNNI, sums of two products of 8 bits would saturate at 16 bits.
        options.add_session_config_entry("session.x64quantprecision", "1")
        return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])

    def of_version(self, weights: bytes) -> OnnxDrafter:
        """A drafter of another version, with empty caches.

        Args:
            weights: the bytes for `Manifest.versions`.

        Raises:
            RefusedError: they are no weights of this drafter, or the bundle's file has changed.
        """
        twin = copy(self)
        try:
            twin._session = self._make_session(self._graph_of(weights))
            twin._clear()
            if not np.isfinite(twin.run([0], 0).log_q).all():
                raise ValueError("a draft's probability is not finite")
        except Exception as error:  # onnxruntime raises of all kinds
            raise RefusedError(f"The server's weights do not fit this bundle: {error}") from error
        twin._clear()
        return twin

    def _graph_of(self, weights: bytes) -> bytes:
        """The graph's file with the weights of a version."""
        versions = self.manifest.versions
        assert versions is not None, "no other bundle is updated"
        if len(weights) != versions.num_bytes:
            raise ValueError(f"they have {len(weights)} bytes instead of {versions.num_bytes}")
        if described(self._graph) != self.manifest.files[GRAPH_FILE]:
            raise ValueError(f"{self._graph} has changed since it was loaded")
        graph, sent = bytearray(self._graph.read_bytes()), io.BytesIO(weights)
        for start, count in versions.ranges:
            graph[start : start + count] = sent.read(count)
        return bytes(graph)

    def adopt(self, other: OnnxDrafter) -> bool:
        """Take another drafter's version of this bundle; returns whether it differs.

        Activations stay; SA's cache must be computed again.
        """
        if other._session is self._session:
            return False
        self._session = other._session
        self._bind()
        return True

    def for_another_text(self) -> OnnxDrafter:
        """A drafter with the same weights and caches of its own."""
        twin = copy(self)
        twin._clear()
        return twin

    def _clear(self) -> None:
        """Replace the caches by empty ones."""
        self.caches: dict[str, Any] = {}
        self._mask = np.zeros(0, np.bool_)
        self.reserve(min(FIRST_SLOTS, self.manifest.max_positions))

    def run(self, token_ids: Sequence[int], start: int) -> Drafts:
        """Store T tokens of a text from position `start` on, and draft the token after them.

        Tokens before `start` must have been stored. Later slots are not attended to, so `start`
        alone cuts a text. Until activations are placed, the drafts are meaningless.

        Raises:
            InputError: no tokens, or positions that the target does not have.
        """
        self._reach(start, start + len(token_ids))
        self._bound.bind_cpu_input("token_ids", np.array(token_ids, np.int64))
        self._bound.bind_cpu_input("start", np.array([start], np.int64))
        self._session.run_with_iobinding(self._bound)
        *_, ids, log_q = self._bound.get_outputs()
        # Copies: the next run writes into the same memory.
        return Drafts(ids.numpy().copy(), log_q.numpy().copy())

    def place(
        self, start: int, key_CTD: Floats, value_CTD: Floats, layers_2NHTD: Floats | None = None
    ) -> None:
        """Store activations of verified tokens from position `start` on, in any order.

        Args:
            start: position of the first.
            key_CTD: CA's keys.
            value_CTD: CA's values.
            layers_2NHTD: keys and values of the reused layers; None where N is 0.

        Raises:
            InputError: no tokens, or positions that the target does not have.
        """
        stop = start + key_CTD.shape[1]
        self._reach(start, stop)
        for name, new in zip(MEMORY, (key_CTD, value_CTD), strict=True):
            self.caches[name][:, start:stop] = new
        if layers_2NHTD is not None:
            for pair, pair_2HTD in zip(self._layers, layers_2NHTD.swapaxes(0, 1), strict=True):
                for name, new in zip(pair, pair_2HTD, strict=True):
                    self.caches[name][:, start:stop] = new
        self._mask[start:stop] = True

    def cut(self, length: int) -> None:
        """Forget CA's keys and values from position `length` on."""
        self._mask[length:] = False

    def reserve(self, num_slots: int) -> None:
        """Make room in the caches, at least twice as much as before; contents stay."""
        old = len(self._mask)
        if num_slots <= old:
            return
        size = max(num_slots, min(2 * old, self.manifest.max_positions))
        shapes = dict.fromkeys(chain(*self._text), self.manifest.self_attention)
        shapes |= dict.fromkeys(MEMORY, self.manifest.cross_attention)
        shapes |= dict.fromkeys(chain(*self._layers), self.manifest.target)
        grown = {
            name: np.zeros((sizes["num_kv_heads"], size, sizes["head_dim"]), np.float32)
            for name, sizes in shapes.items()
        }
        mask = np.zeros(size, np.bool_)
        for name, cache in self.caches.items():
            grown[name][:, :old] = cache
        mask[:old] = self._mask
        self.caches, self._mask = grown, mask
        self._bind()

    def _reach(self, start: int, stop: int) -> None:
        """Make room for these positions, or refuse them."""
        if not 0 <= start < stop <= self.manifest.max_positions:
            raise InputError(
                f"Got positions {start}..{stop - 1}; expected at least one, within "
                f"0..{self.manifest.max_positions - 1}."
            )
        self.reserve(stop)

    def _bind(self) -> None:
        """Bind the caches; a cache that a run writes is both input and output."""
        self._bound = self._session.io_binding()
        arrays: Mapping[str, Any] = self.caches | {"memory_mask": self._mask}
        for name, array in arrays.items():
            value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
            self._bound.bind_ortvalue_input(name, value)
            if name in self.caches and name not in MEMORY:
                self._bound.bind_ortvalue_output(f"new_{name}", value)
        self._bound.bind_output("top_token_ids")
        self._bound.bind_output("top_log_q")
