"""Passes over several rows: long rows are split to save pads, and the head runs on some at a time.

Legend: B rows, T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from moaspec.engine.local_verifier import PassRow

MAX_PAD_RATIO = 1.5
"""Largest ratio of a pass's tokens, pads included, to its real tokens; above it long rows are
split."""

MIN_SPLIT_TOKENS = 16  # least length of the parts into which a prompt is split
MAX_HEAD_NODES = 256  # most nodes in one call of the head, unless one request has more

CPU_CLIENT_ROWS = 4
CPU_CLIENT_TOKENS = 16
"""Rows and tokens that a CPU computes in about the time in which it reads the weights."""


def client_rows(device: torch.device) -> int:
    """Rows of one client that a step shared by several clients always takes.

    On a CPU each row makes the step longer for all clients. On a GPU the time to read the weights
    dominates, and a limit would only lower the throughput.
    """
    return CPU_CLIENT_ROWS if device.type == "cpu" else 1 << 30


def client_tokens(device: torch.device) -> int:
    """New tokens and drafts of one client that a pass shared by several clients always takes."""
    return CPU_CLIENT_TOKENS if device.type == "cpu" else 1 << 30


def ragged_states(
    rows: Sequence[PassRow], run: Callable[[Sequence[PassRow]], Tensor], *, recorded: bool = False
) -> list[Tensor]:
    """One pass over all rows: the final states of each one's tokens, (n, E).

    Args:
        run: the pass, right-padded; returns (B, T, E).
        recorded: whether passes are recorded; then rows with drafts, whose number of parts would
            change from pass to pass, are not split.
    """
    whole = [row.drafted and (recorded or not row.request.tree.is_chain) for row in rows]
    width = _width(rows, [row for row, one in zip(rows, whole, strict=True) if one])
    split = [[row] if one else _split(row, width) for row, one in zip(rows, whole, strict=True)]
    hidden_BTE = run([part for parts in split for part in parts])
    states: list[Tensor] = []
    first = 0
    for parts in split:
        own = [hidden_BTE[first + i, : len(part.tokens)] for i, part in enumerate(parts)]
        states.append(torch.cat(own) if len(own) > 1 else own[0])
        first += len(parts)
    return states


def _split(row: PassRow, width: int) -> list[PassRow]:
    """The row split into rows of `width` tokens; the last one may be shorter.

    Each part attends to the parts before it in the same pass, because a layer stores all keys
    before it computes attention. Only the last part may have pads: they overwrite the next slots.
    """
    cuts = range(0, len(row.tokens), width)
    if len(cuts) == 1:
        return [row]
    parts = [row.tokens[cut : cut + width] for cut in cuts]
    return [
        replace(row, start=row.start + cut, tokens=part, num_new=len(part))
        for cut, part in zip(cuts, parts, strict=True)
    ]


def _width(rows: Sequence[PassRow], whole: Sequence[PassRow]) -> int:
    """Tokens of each row of a pass: those of the longest, unless pads would cost too much."""
    sizes = [len(row.tokens) for row in rows]
    if len(sizes) * max(sizes) <= MAX_PAD_RATIO * sum(sizes):
        return max(sizes)
    reads = any(row.num_new > 1 for row in rows)
    return max([MIN_SPLIT_TOKENS if reads else 1, *(len(row.tokens) for row in whole)])


def head_groups(rows: Sequence[PassRow]) -> Iterator[list[PassRow]]:
    """Split rows into groups whose nodes fit into one call of the head."""
    group: list[PassRow] = []
    nodes = 0
    for row in rows:
        own = 1 + len(row.request.tree.tokens)
        if group and nodes + own > MAX_HEAD_NODES:
            yield group
            group, nodes = [], 0
        group.append(row)
        nodes += own
    yield group
