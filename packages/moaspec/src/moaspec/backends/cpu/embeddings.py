"""Token embeddings as kernels look them up: bf16, or in the bits of a GGUF file."""

import ctypes
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from moaspec.backends.cpu.build import call, library, why_not
from moaspec.backends.cpu.structures import EmbeddingsStruct
from moaspec.target.weights.stored import StoredEmbedding, require_ids


def kernels_embed(table: object) -> "TypeGuard[EmbeddingTable]":
    """Whether kernels look up embeddings of this table."""
    if isinstance(table, KernelEmbedding):
        return True
    return isinstance(table, nn.Embedding) and table.weight.dtype == torch.bfloat16


def embeddings_struct(table: "EmbeddingTable") -> EmbeddingsStruct:
    """Where the table is now; see `kernels_embed`."""
    if isinstance(table, KernelEmbedding):
        return table.struct
    return EmbeddingsStruct(table.weight.data_ptr(), 0)


def embed_by_kernels(model: Any) -> None:
    """Let a model whose embeddings are in a file look them up by a kernel, where there are any."""
    table = model.get_input_embeddings()
    is_stored = isinstance(table, StoredEmbedding) and table.dtype == torch.bfloat16
    if is_stored and why_not() is None:
        model.set_input_embeddings(KernelEmbedding(table))


class KernelEmbedding(StoredEmbedding):
    """Embeddings in a file's bits, by a kernel.

    The bits are a copy: no change of the file after the load reaches a text.

    Attributes:
        struct: where they are.
    """

    def __init__(self, table: StoredEmbedding) -> None:
        super().__init__(table.stored, table.dtype)
        (part,) = table.stored.parts  # in the file's order
        self._blocks = torch.from_numpy(np.array(part.tensor.blocks))
        part.tensor.forget_pages()
        self.struct = EmbeddingsStruct(self._blocks.data_ptr(), part.kind)

    def forward(self, token_ids: Tensor) -> Tensor:
        require_ids(token_ids, self.num_embeddings)
        ids = token_ids.long().contiguous()
        out = torch.empty((*ids.shape, self.embedding_dim), dtype=torch.bfloat16)
        count, width = ids.numel(), self.embedding_dim
        call(library().moaspec_embed, ctypes.byref(self.struct), ids, count, width, out)
        return out


EmbeddingTable = nn.Embedding | KernelEmbedding
