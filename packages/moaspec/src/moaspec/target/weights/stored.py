"""Layers whose weights stay in a GGUF file, in its bits, until a backend packs them.

The file is mapped: pages are read when a weight is used, and processes share them.

Legend: O outputs, I inputs, V vocabulary, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moaspec.target.weights.gguf_file import GGUFFile, GGUFTensor
from moaspec.target.weights.gguf_tensors import Source
from moaspec_core.errors import UnknownModelError

HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
"""Types of tensors that stay in their bits, and where a block has its float16 numbers."""


@dataclass(frozen=True)
class StoredRows:
    """Rows of a quantised tensor.

    Args:
        order: which rows of the tensor, (O,) int64.
    """

    tensor: GGUFTensor
    order: np.ndarray

    @property
    def kind(self) -> int:
        """The number of the tensor's type in ggml."""
        return int(self.tensor.kind)

    @property
    def num_inputs(self) -> int:
        return self.tensor.shape[-1]

    def weight(self, rows: np.ndarray | slice = slice(None)) -> Tensor:
        """The values of some rows, in float32, as the format defines them."""
        # Imported here: few targets are GGUF files.
        from gguf.quants import dequantize

        values = dequantize(self.tensor.blocks[self.order[rows]], self.tensor.kind)
        return torch.from_numpy(np.array(values, dtype=np.float32))


class StoredWeight:
    """A weight, (O, I), whose rows are in one tensor or several, one below the other."""

    def __init__(self, parts: Sequence[StoredRows]) -> None:
        self.parts = tuple(parts)
        self.shape = (sum(len(part.order) for part in parts), parts[0].num_inputs)

    @classmethod
    def of(cls, source: Source, file: GGUFFile) -> StoredWeight | None:
        """The weight of a linear layer or embedding.

        None where a type is not in `HALVES`, or where something is subtracted.

        Raises:
            UnknownModelError: it has NaN or infinite values.
        """
        tensors = [file.tensors[name] for name in source.tensors]
        if any(tensor.kind.name not in HALVES for tensor in tensors) or source.offset:
            return None
        for tensor in tensors:
            _require_finite(tensor)
            tensor.forget_pages()
        return cls([StoredRows(tensor, source.order(tensor.shape[-2])) for tensor in tensors])

    def dequantised(self) -> Tensor:
        """All values, (O, I) float32."""
        return torch.cat([part.weight() for part in self.parts])

    def rows(self, ids: Tensor) -> Tensor:
        """The values of some rows, (len(ids), I) float32.

        Raises:
            IndexError: an id that is no row.
        """
        require_ids(ids, self.shape[0])
        asked, found = ids.cpu().numpy(), torch.empty(len(ids), self.shape[1])
        start = 0
        for part in self.parts:
            here = (asked >= start) & (asked < start + len(part.order))
            if here.any():
                found[torch.from_numpy(here)] = part.weight(asked[here] - start)
            start += len(part.order)
        return found

    @staticmethod
    def joined(weights: Sequence[StoredWeight]) -> StoredWeight:
        """The rows of all, one below the other."""
        return StoredWeight([part for weight in weights for part in weight.parts])


def require_ids(ids: Tensor, num: int) -> None:
    """Refuse ids that are not from 0 to `num` - 1, by an IndexError as PyTorch does."""
    low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
    if not 0 <= low <= high < max(num, 1):
        raise IndexError(f"ids must be from 0 to {num - 1}, got {low} to {high}")


class StoredLinear(nn.Module):
    """A frozen linear layer; its product dequantises the whole weight.

    Args:
        dtype: of products and of `weight`.
        is_tied: it shares the embedding's weight, so that it is not saved.

    Attributes:
        rounds_inputs: whether kernels round its inputs to 8 bits, see `backends.rounded_inputs`.
    """

    bias: Tensor | None
    dtype: torch.dtype
    rounds_inputs = False

    def __init__(
        self,
        stored: StoredWeight,
        bias: Tensor | None,
        dtype: torch.dtype,
        *,
        is_tied: bool = False,
    ) -> None:
        super().__init__()
        self.stored, self.dtype, self._is_tied = stored, dtype, is_tied
        self.out_features, self.in_features = stored.shape
        frozen = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.register_parameter("bias", frozen)

    @property
    def weight(self) -> Tensor:
        """(O, I), dequantised on every access."""
        return self.stored.dequantised().to(self.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """Some rows of `weight`."""
        return self.stored.rows(ids).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Appear in `state_dict` like the plain layer, so that the model can be saved."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self._is_tied:
            destination[f"{prefix}weight"] = self.weight


class StoredEmbedding(nn.Module):
    """Token embeddings, dequantised row by row."""

    dtype: torch.dtype

    def __init__(self, stored: StoredWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.stored, self.dtype = stored, dtype
        self.num_embeddings, self.embedding_dim = stored.shape

    @property
    def weight(self) -> Tensor:
        """(V, E), dequantised on every access."""
        return self.stored.dequantised().to(self.dtype)

    def forward(self, token_ids: Tensor) -> Tensor:
        found = self.stored.rows(token_ids.flatten())
        return found.to(self.dtype).unflatten(0, token_ids.shape)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight


def fill_from_file(model: Any, sources: Mapping[str, Source], file: GGUFFile) -> None:
    """Give a model on the meta device its weights, quantised ones in the file's bits.

    Raises:
        UnknownModelError: a tensor has NaN or infinite values.
    """
    dtype = model.dtype
    _compute_buffers(model)
    for name, source in sources.items():
        path, _, part = name.rpartition(".")
        module = model.get_submodule(path)
        plain = type(module) in (nn.Linear, nn.Embedding) and part == "weight"
        stored = StoredWeight.of(source, file) if plain else None
        if stored is None:
            value = source.read(file).to(dtype)
            if not bool(value.isfinite().all()):
                raise UnknownModelError(f"{name} has NaN or infinite values in {str(dtype)[6:]}.")
            setattr(module, part, nn.Parameter(value, requires_grad=False))
        elif isinstance(module, nn.Embedding):
            model.set_submodule(path, StoredEmbedding(stored, dtype))
        else:
            model.set_submodule(path, StoredLinear(stored, module.bias, dtype))
    _tie_head(model)


def _compute_buffers(model: Any) -> None:
    """Compute what transformers computes from a config, such as frequencies."""
    for module in model.modules():
        held = dict(module.named_buffers(recurse=False))
        for name, buffer in held.items():
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
        if held:
            model._init_weights(module)  # initialises its weights too, which are on the meta device


def _tie_head(model: Any) -> None:
    """Let a head without weights of its own share the embedding's."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if isinstance(head, nn.Linear) and head.weight.is_meta:
        if isinstance(table, StoredEmbedding):
            model.set_output_embeddings(
                StoredLinear(table.stored, head.bias, table.dtype, is_tied=True)
            )
        else:
            head.weight = table.weight


def _require_finite(tensor: GGUFTensor) -> None:
    """Refuse a block whose float16 numbers are NaN or infinite; others give finite values."""
    from gguf import GGML_QUANT_SIZES

    blocks = tensor.blocks.reshape(-1, GGML_QUANT_SIZES[tensor.kind][1])
    for start in HALVES[tensor.kind.name]:
        high = blocks[:, start + 1]  # with the exponent
        if bool(((high & 0x7C) == 0x7C).any()):
            raise UnknownModelError(f"{tensor.name} has NaN or infinite values.")
