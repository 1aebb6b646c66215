"""LM heads in the form that this CPU multiplies fastest.

A head becomes a packed copy. Its weight, which a tied embedding still looks up row by row,
moves to a file, unless it is in a GGUF file. The rows of a draft vocabulary are copied and packed.
"""

import mmap
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile

import torch
from torch import Tensor, nn

from moaspec.backends.cpu.matrix import Matrix
from moaspec.backends.linear_backends import can_pack
from moaspec.backends.pack import Linear, PackedLinear
from moaspec.target.decoder_layers import LMHead
from moaspec.target.target import Target
from moaspec_core.support.paths import cache_dir, make_private


class PackedHead(PackedLinear):
    """A packed LM head with outputs in float32, if kernels can without rounding them first."""

    is_head = True

    def forward(self, x: Tensor) -> Tensor:
        return self.single(x)


class FastLMHead(LMHead):
    """An `LMHead` by a packed copy, on a CPU that `can_pack`.

    After that only single rows of the weight are read, by a tied embedding or for a draft head, so
    the weight moves to a file, see `map_into_memory`.
    """

    def __init__(self, head: LMHead) -> None:
        super().__init__(head.linear, head.cap, head.scale)
        assert isinstance(head.linear, Linear)
        self._plain, self._whole = head, _in_large_pages(PackedHead(head.linear))
        if self._whole.matrix is not None:
            self._whole.matrix.add_bounds()
        self._forget_rows: Callable[[], None] = lambda: None
        if isinstance(head.linear, nn.Linear):
            self._forget_rows = map_into_memory(head.linear.weight, cache_dir())

    def select(self, token_ids: Tensor | None) -> nn.Module:
        head = self._plain.select(token_ids)
        if head is self.linear:
            return self._whole
        self._forget_rows()
        return head

    @property
    def matrix(self) -> Matrix | None:
        """The weight, if kernels can find the largest logits by it alone."""
        return None if self.cap is not None else self._whole.matrix

    def best(self, states_NE: Tensor) -> Tensor:
        matrix = self.matrix
        if matrix is None or states_NE.requires_grad:
            return super().best(states_NE)
        return matrix.best(states_NE)


def fast_draft_head(
    target: Target, token_ids: Tensor | None, moment_EE: Tensor | None = None
) -> nn.Module:
    """`Target.draft_head`, packed where that helps, and rounded where `moment_EE` is given."""
    head = target.draft_head(token_ids)
    if head is target.draft_head(None) or not isinstance(head, nn.Linear):
        return head
    return draft_rows(head, moment_EE)


def draft_rows(rows: nn.Linear, moment_EE: Tensor | None) -> nn.Module:
    """Rows of a head for drafts, packed where that helps; rounded with a moment."""
    if not can_pack(rows.weight.dtype, rows.weight.device):
        return rows
    return _in_large_pages(PackedHead(rows, drafts=moment_EE is not None, moment_II=moment_EE))


def _in_large_pages(head: PackedHead) -> PackedHead:
    if head.matrix is not None:
        head.matrix.use_large_pages()
    return head


def map_into_memory(table: Tensor, directory: Path) -> Callable[[], None]:
    """Back the tensor with an unlinked mmap so that only touched pages are resident.

    Without room on the disk the tensor stays in memory.

    Args:
        table: contiguous, on the CPU; changed in place.
        directory: on a disk, made where it is missing.

    Returns:
        A function that drops all resident pages; the tensor must not have been written to.
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
