"""Token embeddings as kernels look them up: bf16, or in the bits of a GGUF file."""

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from moaspec.backends.cpu.build import call, library, why_not
from moaspec.backends.cpu.structures import EmbeddingsStruct
from moaspec.target.weights.stored import StoredEmbedding

EmbeddingTable = nn.Embedding | StoredEmbedding


def kernels_embed(table: object) -> bool:
    """Whether kernels look up embeddings of this table."""
    if isinstance(table, StoredEmbedding):
        return table.dtype == torch.bfloat16
    return isinstance(table, nn.Embedding) and table.weight.dtype == torch.bfloat16


def embeddings_struct(table: EmbeddingTable) -> EmbeddingsStruct:
    """Where the table is now; see `kernels_embed`."""
    if isinstance(table, nn.Embedding):
        return EmbeddingsStruct(table.weight.data_ptr(), 0)
    (part,) = table.stored.parts
    return EmbeddingsStruct(part.tensor.blocks.ctypes.data, part.kind)


def embed_by_kernels(model: Any) -> None:
    """Let a model whose embeddings are in a file look them up by a kernel, where there are any."""
    table = model.get_input_embeddings()
    if isinstance(table, StoredEmbedding) and kernels_embed(table) and why_not() is None:
        model.set_input_embeddings(_KernelEmbedding(table))


class _KernelEmbedding(StoredEmbedding):
    """Embeddings of a file, by a kernel."""

    def __init__(self, table: StoredEmbedding) -> None:
        super().__init__(table.stored, table.dtype)
        self._struct = embeddings_struct(table)

    def forward(self, token_ids: Tensor) -> Tensor:
        if token_ids.numel() and not 0 <= token_ids.min() <= token_ids.max() < self.num_embeddings:
            raise IndexError(f"token ids must be from 0 to {self.num_embeddings - 1}")
        ids = token_ids.contiguous()
        out = torch.empty((*ids.shape, self.embedding_dim), dtype=torch.bfloat16)
        count, width = ids.numel(), self.embedding_dim
        call(library().moaspec_embed, ctypes.byref(self._struct), ids, count, width, out)
        return out
