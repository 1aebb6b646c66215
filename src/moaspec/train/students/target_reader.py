"""What the frozen target says of a batch, computed or read back from disk.

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
from moaspec.train.students.activation_store import (
    ActivationCache,
    ExampleStore,
    FinalStates,
    fingerprint,
)


class TargetReader:
    """Passes of the target over examples, kept on disk where there is a directory.

    Args:
        target: the frozen target.
        examples: those that batches are made of.
        directory: where activations are kept; None computes them every time.
        before: the N > 0 of which the states before the last N layers are wanted.
        finals_only: nobody asks for more than final states, so nothing else is kept.
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
        self._cache: ActivationCache | None = None
        self._finals: FinalStates | None = None
        if directory and finals_only:
            self._finals = FinalStates(directory, examples, target.identity)
        elif directory:
            self._cache = ActivationCache(directory, examples, target.identity, self.before)

    def passes(self, batch: Batch) -> TargetPass:
        """Activations of a batch that is on the target's device."""
        if self._cache is not None:
            return self._cache.passes(self.target, batch)
        return self.target.encode(batch.input_ids_BT, batch.attention_mask_BT, self.before)

    def final_states(self, batch: Batch) -> Tensor:
        """The final states alone, (B, T, E)."""
        if self._finals is not None:
            return self._finals.read(self.target, batch)
        return self.passes(batch).hidden_BTE

    def sample(self, ids: Sequence[int], tokens: int) -> Iterator[tuple[Batch, TargetPass]]:
        """Examples one by one until there are so many tokens."""
        seen = 0
        for index in ids:
            if seen >= tokens:
                return
            batch = collate(self.examples, [index]).to(self.target.device)
            seen += len(self.examples[index])
            yield batch, self.passes(batch)


class FrozenMeans:
    """What a frozen LSA makes of each example, once and for all, on disk.

    Beside it lies what training reads of the target itself: its final states and, with N > 0, keys
    and values of its last N layers and the states that enter them.

    Args:
        reader: where its inputs come from.
        encoder: with the LSA, which must not change as long as this is used.
        directory: where the numbers are kept.
        bf16: compute in bf16, as decoding does, and by kernels where they are.
    """

    def __init__(
        self, reader: TargetReader, encoder: TargetEncoder, directory: Path, *, bf16: bool = False
    ) -> None:
        self._reader, self._encoder, self._bf16 = reader, encoder, bf16
        if bf16:
            # A dozen operations over all layers of all tokens are one call of kernels.
            whole = copy.deepcopy(encoder).bfloat16()
            self._encoder = packed_copy(whole, exact=list(whole.children()))
        identity = reader.target.identity
        weights = encoder.layer_self_attention.state_dict()
        name = fingerprint(reader.examples, identity, weights)
        self._last = max(reader.before, default=0)
        widths = {"mean": identity.kv_size, "hidden": identity.hidden_size}
        if self._last:
            widths["last"] = self._last * identity.kv_size
        widths |= {f"before{n}": identity.hidden_size for n in reader.before}
        directory /= f"{name}-all-bf16" if bf16 else name
        self._store = ExampleStore(directory, reader.examples, widths)

    def read(self, batch: Batch) -> tuple[Tensor, TargetPass]:
        """Means over layers (B, T, K), and the target's pass with its last layers alone.

        Args:
            batch: on the target's device.
        """
        if not self._store.holds(batch):
            self._write(batch)
        return self._stored("mean", batch), TargetPass(
            self._last_layers(batch),
            self._stored("hidden", batch),
            {n: self._stored(f"before{n}", batch) for n in self._reader.before},
        )

    def _write(self, batch: Batch) -> None:
        result = self._reader.passes(batch)
        with torch.no_grad():
            mean_BTK = self._encoder.mean_over_layers(result.kv_BTLK)
        arrays = {"mean": mean_BTK, "hidden": result.hidden_BTE}
        arrays |= {f"before{n}": states for n, states in result.before.items()}
        if self._last:
            arrays["last"] = result.kv_BTLK[:, :, -self._last :].flatten(2)
        self._store.write(batch, **{name: array.cpu() for name, array in arrays.items()})

    def _last_layers(self, batch: Batch) -> Tensor:
        """Keys and values of the last N layers, (B, T, N, K)."""
        target = self._reader.target
        if not self._last:
            empty = torch.empty(*batch.input_ids_BT.shape, 0, target.identity.kv_size)
            return empty.to(target.device)
        return self._stored("last", batch).unflatten(2, (self._last, -1))

    def _stored(self, name: str, batch: Batch) -> Tensor:
        return self._store.read(name, batch).to(self._reader.target.device).float()
