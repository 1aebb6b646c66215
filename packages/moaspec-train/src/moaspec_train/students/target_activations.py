"""Activations of the frozen target for training batches, computed or read from disk.

The target computes the same keys, values and states for an example in every epoch, and a frozen LSA
the same means. Reading them from files of bf16 (`TextStore`) costs a fraction of computing them.

Legend: B batch, T tokens, L target layers, K one layer's key and value, E hidden size.
"""

import copy
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from moaspec.backends.fast_drafter import packed_copy
from moaspec.model.moa import TargetEncoder, TargetPass
from moaspec.target.spec import TargetSpec
from moaspec.target.target import Target
from moaspec_core.checkpoint.drafter_config import TargetIdentity
from moaspec_train.dataset.examples import Batch, Example, collate
from moaspec_train.progress import reported
from moaspec_train.text_store import TextStore

HASHED_WEIGHTS = 4096
"""Values of each of the target's tensors, at most, that tell one target from another."""

PROBE_TOKENS = 64


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


def target_fingerprint(target: Target, *, packed: bool = False) -> str:
    """Hash of the target's shape and of some values of each of its tensors.

    Args:
        packed: whether matrices may be laid out for kernels, as this CPU likes them; then the hash
            is of norms and embeddings.
    """
    digest = hashlib.sha256(repr(target.identity).encode())
    tensors = dict(target.model.named_parameters())
    if packed:
        tensors = {name: one for name, one in tensors.items() if name.endswith("norm.weight")}
        tensors["embeddings"] = target.embed(probe_batch(target).input_ids_BT.to(target.device))
    for name, parameter in tensors.items():
        values = parameter.detach().flatten()
        sample = values[:: max(1, len(values) // HASHED_WEIGHTS)]
        digest.update(name.encode() + sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def probe_batch(target: TargetSpec) -> Batch:
    """A text by which a target's activations are recognised: arbitrary tokens."""
    ids = [(7919 * i + 13) % target.vocab_size for i in range(PROBE_TOKENS)]
    return collate([Example(ids)], [0])


def find_store(
    directory: Path,
    target: TargetSpec,
    widths: Mapping[str, int],
    compute: Callable[[Batch], Mapping[str, Tensor]],
) -> TextStore:
    """The `TextStore` of this target, and of the LSA by which `compute` makes means.

    Args:
        widths: values per token of each array.
        compute: makes every array of a batch, (B, T, ...), and maybe others.

    Raises:
        TrainingError: the directory cannot be written.
    """
    found = compute(probe_batch(target).to(target.device))
    probe = {name: found[name][0].reshape(PROBE_TOKENS, width) for name, width in widths.items()}
    return TextStore.open(directory, probe, target.identity.as_dict())


def fetch(
    store: TextStore,
    examples: Sequence[Example],
    batch: Batch,
    compute: Callable[[Batch], Mapping[str, Tensor]],
) -> dict[str, Tensor]:
    """All arrays of a batch, (B, T, width) bf16 each on its device; pads are zero.

    Args:
        examples: of the run.
        compute: called with those examples of the batch that are not stored; returns every array,
            (B, T, ...), and maybe others.

    Raises:
        TrainingError: the store cannot be written.
    """
    texts = [examples[i].tokens for i in batch.example_ids]
    found = [store.get(ids) for ids in texts]
    missing = [row for row, arrays in enumerate(found) if arrays is None]
    if missing:
        device = batch.input_ids_BT.device
        part = collate(examples, [batch.example_ids[row] for row in missing]).to(device)
        arrays_BT = compute(part)
        for number, row in enumerate(missing):
            ids = texts[row]
            arrays = {name: x[number, : len(ids)] for name, x in arrays_BT.items()}
            found[row] = store.put(ids, arrays)
    rows = [arrays for arrays in found if arrays is not None]
    device, width = batch.input_ids_BT.device, batch.input_ids_BT.shape[1]
    more = max(0, width - max(map(len, texts)))  # the batch may have more pads
    return {
        name: F.pad(
            pad_sequence([row[name] for row in rows], batch_first=True), (0, 0, 0, more)
        ).to(device)
        for name in rows[0]
    }


class TargetActivations:
    """Passes of the target over examples, cached on disk if there is a directory.

    Args:
        examples: of all batches, in a fixed order.
        directory: of the cache, a `TextStore`. None computes activations every time.
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
        self._store: TextStore | None = None
        if directory:
            widths = activation_widths(target.identity, self.before, finals_only=finals_only)
            self._store = find_store(directory, target, widths, self._compute)
            self._store.require_room([one.tokens for one in examples], "activation_cache=false")

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
        if self._store is None:
            return self._compute(batch)
        return fetch(self._store, self.examples, batch, self._compute)

    def _compute(self, batch: Batch) -> dict[str, Tensor]:
        return _arrays(
            self.target.capture(
                batch.input_ids_BT, batch.attention_mask_BT, self.before, right_padded=True
            )
        )


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
        directory: a `TextStore`.
        bf16: compute in bf16, as decoding does, with kernels if available.

    Attributes:
        encoder: the one that computes.
        store: of the means.

    Raises:
        TrainingError: too little disk space, or a directory that cannot be written.
    """

    def __init__(
        self,
        activations: TargetActivations,
        encoder: TargetEncoder,
        directory: Path,
        *,
        bf16: bool = False,
    ) -> None:
        self._activations = activations
        self.encoder = bf16_encoder(encoder) if bf16 else encoder
        target, self._last = activations.target, max(activations.before, default=0)
        widths = mean_widths(target.identity, activations.before)
        # The probe is no example of the run, which `activations` might look up.
        probed = TargetActivations(target, (), None, activations.before)
        compute = partial(self._compute, probed)
        self.store = find_store(directory, target, widths, compute)
        self.store.require_room([one.tokens for one in activations.examples], "frozen_lsa=0")

    def read(self, batch: Batch) -> tuple[Tensor, TargetPass]:
        """Means over layers (B, T, K), and the target's pass with its last N layers only."""
        activations = self._activations
        compute = partial(self._compute, activations)
        stored = fetch(self.store, activations.examples, batch, compute)
        found = {name: array.float() for name, array in stored.items()}
        mean_BTK, hidden_BTE = found["mean"], found["hidden"]
        last_BTX = found["last"] if self._last else mean_BTK[..., :0]
        last_BTLK = last_BTX.unflatten(2, (self._last, mean_BTK.shape[-1]))
        before = {n: found[f"before{n}"] for n in self._activations.before}
        return mean_BTK, TargetPass(last_BTLK, hidden_BTE, before)

    @torch.no_grad()
    def _compute(self, activations: TargetActivations, batch: Batch) -> dict[str, Tensor]:
        result = activations.passes(batch)
        return {
            **_arrays(result),
            "mean": self.encoder.mean_over_layers(result.kv_BTLK),
            "last": result.kv_BTLK[:, :, -self._last :],  # not stored where N is 0
        }


def bf16_encoder(encoder: TargetEncoder) -> TargetEncoder:
    """A copy that computes means over layers in bf16, by kernels where there are some.

    Packed layers run a dozen operations over all layers and tokens in one kernel call.
    """
    whole = copy.deepcopy(encoder).bfloat16()
    return packed_copy(whole, exact=list(whole.children()))
