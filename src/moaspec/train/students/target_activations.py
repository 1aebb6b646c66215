"""Activations of the frozen target for training batches, computed or read from disk.

Legend: B batch, T tokens, L target layers, K one layer's key and value, E hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from moaspec.backends.fast_drafter import packed_copy
from moaspec.model.moa import TargetPass
from moaspec.model.target_encoder import TargetEncoder
from moaspec.target.target import Target
from moaspec.train.dataset.examples import Batch, Example, collate
from moaspec.train.students.activation_store import ExampleStore, activation_widths, fingerprint


class TargetActivations:
    """Passes of the target over examples, cached on disk if there is a directory.

    Args:
        target: the frozen target.
        examples: of all batches, in a fixed order.
        directory: of the cache; each list of examples and target has a subdirectory. None computes
            activations every time.
        before: the N > 0; the states before the last N layers are returned too.
        finals_only: store the final states alone, which is all that a baseline needs.

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
        self._finals_only = finals_only
        self._store: ExampleStore | None = None
        if directory:
            identity = target.identity
            widths = activation_widths(identity)
            widths |= {f"before{n}": identity.hidden_size for n in before}
            if finals_only:
                widths = {"hidden": identity.hidden_size}
            self._store = ExampleStore(
                directory / fingerprint(examples, identity), examples, widths
            )

    def passes(self, batch: Batch) -> TargetPass:
        """Activations of a batch on the target's device; bf16 with zero pads if cached."""
        if self._store is None or self._finals_only:
            return self._encode(batch)
        if not self._store.holds(batch):
            result = self._encode(batch)
            before = {f"before{n}": states.cpu() for n, states in result.before.items()}
            kv_BTX, hidden_BTE = result.kv_BTLK.flatten(2), result.hidden_BTE
            self._store.write(batch, kv=kv_BTX.cpu(), hidden=hidden_BTE.cpu(), **before)
        identity = self.target.identity
        return TargetPass(
            self._read("kv", batch).unflatten(2, (identity.num_layers, identity.kv_size)),
            self._read("hidden", batch),
            {n: self._read(f"before{n}", batch) for n in self.before},
        )

    def final_states(self, batch: Batch) -> Tensor:
        if self._store is None or not self._finals_only:
            return self.passes(batch).hidden_BTE
        if not self._store.holds(batch):
            self._store.write(batch, hidden=self._encode(batch).hidden_BTE.cpu())
        return self._read("hidden", batch)

    def sample(self, ids: Sequence[int], tokens: int) -> Iterator[tuple[Batch, TargetPass]]:
        """Batches of one example each, until they have at least `tokens` tokens in total."""
        seen = 0
        for index in ids:
            if seen >= tokens:
                return
            batch = collate(self.examples, [index]).to(self.target.device)
            seen += len(self.examples[index])
            yield batch, self.passes(batch)

    def _encode(self, batch: Batch) -> TargetPass:
        return self.target.encode(batch.input_ids_BT, batch.attention_mask_BT, self.before)

    def _read(self, name: str, batch: Batch) -> Tensor:
        assert self._store is not None, "called with a store only"
        return self._store.read(name, batch).to(self.target.device)


class LayerMeanCache:
    """Means over layers of a frozen LSA, computed once per example and kept on disk.

    The target's activations that training reads are stored with them: final states and, with
    N > 0, keys and values of the last N layers and the states before them.

    Args:
        activations: of the target, inputs of LSA.
        encoder: its LSA must not change while this cache is used.
        directory: of the cache.
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
        name = fingerprint(activations.examples, identity, weights)
        self._last = max(activations.before, default=0)
        widths = {"mean": identity.kv_size, "hidden": identity.hidden_size}
        if self._last:
            widths["last"] = self._last * identity.kv_size
        widths |= {f"before{n}": identity.hidden_size for n in activations.before}
        directory /= f"{name}-all-bf16" if bf16 else name
        self._store = ExampleStore(directory, activations.examples, widths)

    def read(self, batch: Batch) -> tuple[Tensor, TargetPass]:
        """Means over layers (B, T, K), and the target's pass with its last N layers only."""
        if not self._store.holds(batch):
            self._write(batch)
        return self._stored("mean", batch), TargetPass(
            self._last_layers(batch),
            self._stored("hidden", batch),
            {n: self._stored(f"before{n}", batch) for n in self._activations.before},
        )

    def _write(self, batch: Batch) -> None:
        result = self._activations.passes(batch)
        with torch.no_grad():
            mean_BTK = self._encoder.mean_over_layers(result.kv_BTLK)
        arrays = {"mean": mean_BTK, "hidden": result.hidden_BTE}
        arrays |= {f"before{n}": states for n, states in result.before.items()}
        if self._last:
            arrays["last"] = result.kv_BTLK[:, :, -self._last :].flatten(2)
        self._store.write(batch, **{name: array.cpu() for name, array in arrays.items()})

    def _last_layers(self, batch: Batch) -> Tensor:
        """Keys and values of the last N layers, (B, T, N, K)."""
        target = self._activations.target
        if not self._last:
            empty = torch.empty(*batch.input_ids_BT.shape, 0, target.identity.kv_size)
            return empty.to(target.device)
        return self._stored("last", batch).unflatten(2, (self._last, -1))

    def _stored(self, name: str, batch: Batch) -> Tensor:
        return self._store.read(name, batch).to(self._activations.target.device).float()
