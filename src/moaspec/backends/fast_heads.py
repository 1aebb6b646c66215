"""LM heads in the form that this CPU multiplies fastest, beside embeddings that share a weight.

A head in bf16 becomes a packed copy; the weight itself, of which an embedding reads one row for a
token, is left to a file then. The rows for a draft vocabulary are a copy of their own.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

import torch
from torch import Tensor, nn

from moaspec.backends.linear_backends import SMALLEST_MEASURED, can_pack, fastest_s
from moaspec.backends.pack import PackedLinear
from moaspec.support.paths import make_private


class StreamedLinear(nn.Module):
    """A float32 layer whose own weight stays in use elsewhere, streamed once for a few rows.

    MKL copies the right-hand matrix of a product, so here the weight is the left-hand one, for
    those numbers of rows that this is measured to be faster for.

    Args:
        linear: on the CPU; its weight is shared, not copied.
    """

    MEASURED = (1, 4, 16)
    """Rows that are timed; each stands for those above the one before it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self._streamed = [rows for rows in self.MEASURED if self._is_faster(rows)]

    def _is_faster(self, rows: int) -> bool:
        if self.linear.weight.numel() < SMALLEST_MEASURED:
            return True
        x = torch.ones(rows, self.linear.in_features)
        with torch.no_grad():
            plain_s, streamed_s = fastest_s([partial(self.linear, x), partial(self._stream, x)])
        return streamed_s < plain_s

    def forward(self, x: Tensor) -> Tensor:
        num = x.shape[:-1].numel()
        measured = next((rows for rows in self.MEASURED if num <= rows), None)
        return self._stream(x) if num and measured in self._streamed else self.linear(x)

    def _stream(self, x: Tensor) -> Tensor:
        rows_NE = x.reshape(-1, x.shape[-1])
        num = len(rows_NE)
        # A single row would be multiplied by another kernel, which takes three times as long.
        wide_NE = rows_NE.repeat(2, 1) if num == 1 else rows_NE
        out_NX = torch.mm(self.linear.weight, wide_NE.t())[:, :num].t()
        if self.linear.bias is not None:
            out_NX = out_NX + self.linear.bias
        return out_NX.contiguous().reshape(*x.shape[:-1], -1)


def pack_like(linear: nn.Linear, *, directory: Path) -> tuple[nn.Module, Callable[[], None]]:
    """A faster stand-in for a layer whose own weight stays in use elsewhere (a tied LM head).

    The bf16 one is a packed copy. Of the weight itself only single rows are read from then on (by
    an embedding that shares it, or for a draft head), so it is left to a file, see
    `map_into_memory`.

    Args:
        linear: is kept, and so is the value of its weight.
        directory: for that file.

    Returns:
        The stand-in, and a call that gives back the memory of the weight's rows that were read.
    """
    if not can_pack(linear.weight.dtype, linear.weight.device):
        return linear, lambda: None
    if linear.weight.dtype == torch.float32:
        return StreamedLinear(linear), lambda: None
    return _settled(PackedLinear(linear)), map_into_memory(linear.weight, directory)


def draft_rows(rows: nn.Linear, moment_EE: Tensor | None) -> nn.Module:
    """Rows of a head for drafts, packed where that helps; rounded where they may be.

    Args:
        rows: of the head.
        moment_EE: how drafted states vary together; without it nothing is rounded.
    """
    if not can_pack(rows.weight.dtype, rows.weight.device):
        return rows
    return _settled(PackedLinear(rows, drafts=moment_EE is not None, moment_II=moment_EE))


def _settled(head: PackedLinear) -> PackedLinear:
    if head.matrix is not None:
        head.matrix.settle()
    return head


def map_into_memory(table: Tensor, directory: Path) -> Callable[[], None]:
    """Let a tensor's numbers live in a file, of which only what is read takes memory.

    The file has no name, and is gone with the tensor. Without room for it all stays as it is.

    Args:
        table: contiguous, on the CPU; changed in place.
        directory: on a disk, made where it is missing.

    Returns:
        A call that gives back the memory of what was read so far; nothing may have been written.
    """
    numbers = table.detach().view(torch.uint8).numpy()
    try:
        make_private(directory)
        with TemporaryFile(dir=directory) as file:
            numbers.tofile(file)
            file.flush()
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError):
        return lambda: None
    table.data = torch.frombuffer(pages, dtype=table.dtype).view(table.shape)
    if not hasattr(mmap, "MADV_DONTNEED"):
        return lambda: None
    return lambda: pages.madvise(mmap.MADV_DONTNEED)
