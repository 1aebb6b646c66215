"""Weights in eight bits, one scale per row: half of bf16, on disk and in memory.

A row is a token of an embedding, or an output of a linear layer. Products run in bf16 on the CPU by
a kernel that reads the eight bits; elsewhere the weights are widened first.

Legend: R rows, I inputs, V vocabulary, E hidden size.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KERNEL_BLOCK = 16
"""Inputs that the CPU's kernel reads at once; of other row lengths it reads past the end."""
ALIGNMENT = 64
"""Bytes. The kernel crashes on weights that do not start at a multiple of it, so weights of a
mapped file that start elsewhere are copied."""


class _Int8Rows(nn.Module):
    """Quantised rows. They are buffers, which are not trained, and which a cast must not change."""

    rows_RI: Tensor
    scale_R: Tensor

    def __init__(self, rows_RI: Tensor, scale_R: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.register_buffer("rows_RI", rows_RI, persistent=False)
        self.register_buffer("scale_R", scale_R.to(dtype), persistent=False)


class Int8Embedding(_Int8Rows):
    """Token embeddings from quantised rows.

    Args:
        rows_RI: (V, E) int8.
        scale_R: (V,).
        factor: multiplies the embeddings (Gemma).
    """

    def __init__(
        self, rows_RI: Tensor, scale_R: Tensor, dtype: torch.dtype, factor: float = 1.0
    ) -> None:
        super().__init__(rows_RI, scale_R, dtype)
        self._factor = factor

    def forward(self, token_ids: Tensor) -> Tensor:
        found = self.rows_RI[token_ids].to(self.dtype) * self.scale_R[token_ids][..., None]
        return found if self._factor == 1.0 else found * found.new_tensor(self._factor)


class Int8Linear(_Int8Rows):
    """A linear layer of (R, I) int8 rows, their scales (R,), and a bias (R,) or None."""

    bias: Tensor | None

    def __init__(
        self, rows_RI: Tensor, scale_R: Tensor, dtype: torch.dtype, bias: Tensor | None = None
    ) -> None:
        aligned = rows_RI.data_ptr() % ALIGNMENT == 0
        super().__init__(rows_RI if aligned else rows_RI.clone(), scale_R, dtype)
        self.out_features, self.in_features = rows_RI.shape
        self.register_buffer("bias", None if bias is None else bias.to(dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self._product(x)
        return y if self.bias is None else y + self.bias

    def _product(self, x: Tensor) -> Tensor:
        fits = self.in_features % KERNEL_BLOCK == 0 and x.device.type == "cpu"
        if fits and self.dtype == torch.bfloat16:
            flat = torch.ops.aten._weight_int8pack_mm(
                x.reshape(-1, self.in_features).contiguous(), self.rows_RI, self.scale_R
            )
            return cast(Tensor, flat).view(*x.shape[:-1], self.out_features)
        return F.linear(x, self.rows_RI.to(self.dtype)) * self.scale_R

    def select(self, rows: Tensor) -> Int8Linear:
        """The layer for these rows alone, a copy."""
        bias = None if self.bias is None else self.bias[rows]
        return Int8Linear(self.rows_RI[rows].contiguous(), self.scale_R[rows], self.dtype, bias)
