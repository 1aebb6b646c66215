"""What the frozen target says of a batch, computed or read back from disk.

Legend: B batch, T tokens, L target layers, K one layer's key and value, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from moaspec.model.drafter import TargetPass
from moaspec.model.encoder import Encoder
from moaspec.target import Target
from moaspec.train.activations import ActivationCache, ExampleStore, FinalStates, fingerprint
from moaspec.train.data import Batch, Example, collate


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
        self.target, self.examples, self._before = target, examples, tuple(before)
        self._cache: ActivationCache | None = None
        self._finals: FinalStates | None = None
        if directory and finals_only:
            self._finals = FinalStates(directory, examples, target.identity)
        elif directory:
            self._cache = ActivationCache(directory, examples, target.identity, self._before)

    def passes(self, batch: Batch) -> TargetPass:
        """Activations of a batch that is on the target's device."""
        if self._cache is not None:
            return self._cache.passes(self.target, batch)
        return self.target.encode(batch.input_ids_BT, batch.attention_mask_BT, self._before)

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

    Args:
        reader: where its inputs come from.
        encoder: with the LSA, which must not change as long as this is used.
        directory: where the numbers are kept.
        bf16: compute products in bf16, as mixed precision does in training.
    """

    def __init__(
        self, reader: TargetReader, encoder: Encoder, directory: Path, *, bf16: bool = False
    ) -> None:
        self._reader, self._encoder, self._bf16 = reader, encoder, bf16
        identity = reader.target.identity
        weights = encoder.layer_self_attention.state_dict()
        name = fingerprint(reader.examples, identity, weights)
        self._store = ExampleStore(
            directory / (f"{name}-bf16" if bf16 else name),
            reader.examples,
            {"mean": identity.kv_size, "hidden": identity.hidden_size},
        )

    def read(self, batch: Batch, result: TargetPass | None = None) -> tuple[Tensor, Tensor]:
        """Means over layers (B, T, K) and the target's final states (B, T, E).

        Args:
            batch: on the target's device.
            result: the target's pass over it, where the caller has one.
        """
        store, device = self._store, self._reader.target.device
        if not store.holds(batch):
            result = result or self._reader.passes(batch)
            with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=self._bf16):
                mean_BTK = self._encoder.mean_over_layers(result.kv_BTLK)
            store.write(batch, mean=mean_BTK.cpu(), hidden=result.hidden_BTE.cpu())
        mean_BTK = store.read("mean", batch).to(device).float()
        return mean_BTK, store.read("hidden", batch).to(device).float()
