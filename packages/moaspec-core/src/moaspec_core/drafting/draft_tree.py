"""Drafted trees (`DraftTree`), and the shapes that they are grown in (`Tree`).

A tree lists its nodes parents first; parent -1 is the root, the newest token, which the target has
already chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from moaspec_core.errors import ShapeError

MAX_SIZES = {"depth": 128, "breadth": 128, "total_tokens": 1024}
"""Far above sizes that pay; larger ones are mistakes, and would draft for minutes."""

_CAUSAL = np.tri(64, dtype=np.bool_)
_CAUSAL.flags.writeable = False


@dataclass(frozen=True)
class Tree:
    """A dynamic tree's shape: expand the best `breadth` leaves per level, keep the best nodes.

    Args:
        depth: levels of drafts, so at most `depth` drafts are accepted in a round.
        breadth: leaves expanded per level, and children of each.
        total_tokens: drafts that the target verifies in one pass.

    Raises:
        ShapeError: impossible sizes, or sizes above `MAX_SIZES`.

    Source: EAGLE-2, arXiv 2406.16858. The paper's tree is `Tree(6, 8, 62)`.
    """

    depth: int
    breadth: int
    total_tokens: int

    def __post_init__(self) -> None:
        for name, most in MAX_SIZES.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise ShapeError(f"Tree {name} must be an integer within 1..{most}, got {value!r}.")
        most = candidates(self.depth, self.breadth)
        if not self.depth <= self.total_tokens <= most:
            raise ShapeError(
                f"A tree of depth {self.depth} and breadth {self.breadth} has {self.depth} to "
                f"{most} tokens, got total_tokens={self.total_tokens}."
            )

    @property
    def least_log_p(self) -> float:
        """Least log-probability of a path whose last draft gets children; see `PricedTree`."""
        return -math.inf

    def kept(self, log_p: Sequence[float]) -> int:
        """How many drafts to verify.

        Args:
            log_p: log-probabilities of their paths, descending.
        """
        return min(len(log_p), self.total_tokens)

    def limited(self, depth: int) -> Tree | None:
        """This tree cut to `depth` levels; None when nothing is left."""
        if depth >= self.depth:
            return self
        if depth < 1:
            return None
        return self._cut(depth, self.breadth)

    def narrowed(self, breadth: int) -> Tree:
        """This tree with at most `breadth` (1 or more) leaves expanded, and children of each."""
        return self if breadth >= self.breadth else self._cut(self.depth, breadth)

    def _cut(self, depth: int, breadth: int) -> Tree:
        return Tree(depth, breadth, min(self.total_tokens, candidates(depth, breadth)))

    def __str__(self) -> str:
        return f"tree:{self.depth}x{self.breadth}x{self.total_tokens}"


def candidates(depth: int, breadth: int) -> int:
    """How many nodes are drafted for a tree of this depth and breadth."""
    return breadth + (depth - 1) * breadth**2


@dataclass(frozen=True)
class DraftTree:
    """Drafted tokens and each one's parent (index into `tokens`, -1: the root).

    Attributes:
        parents: by node, each before its children.
        num_copied: number of nodes at the end that come from n-gram branches, not from the drafter.
        levels: number of drafted levels, 0 if unknown; the deepest may have no node here.
        num_expanded: number of drafted nodes that got children, kept here or not.
        log_p: log-probability that each node's path survives; empty if unknown.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    num_copied: int = 0
    levels: int = 0
    num_expanded: int = 0
    log_p: tuple[float, ...] = field(default=(), compare=False)

    @cached_property
    def depths(self) -> list[int]:
        """Level of each node; children of the root are 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return depths

    @cached_property
    def is_chain(self) -> bool:
        """Whether each node is the only child of the one before it."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @cached_property
    def ancestors(self) -> npt.NDArray[np.bool_]:
        return causal(len(self.parents)) if self.is_chain else ancestor_matrix(self.parents)


def causal(size: int) -> npt.NDArray[np.bool_]:
    """[i, j] is True when j is at most i; read-only."""
    return _CAUSAL[:size, :size] if size <= len(_CAUSAL) else np.tri(size, dtype=np.bool_)


def ancestor_matrix(parents: Sequence[int]) -> npt.NDArray[np.bool_]:
    """[i, j] is True when node j is i itself or one of its ancestors."""
    above = np.array([*parents, -1])  # index -1 is the last entry: the root's parent is the root
    nodes = level = np.arange(len(parents))
    matrix = np.zeros((len(parents), len(parents) + 1), dtype=np.bool_)
    while (level >= 0).any():
        matrix[nodes, level] = True
        level = above[level]
    return matrix[:, :-1]


def children(tree: DraftTree) -> dict[tuple[int, int], int]:
    """Node by (parent, token); where a token was drafted twice, the first node counts."""
    nodes = enumerate(zip(tree.parents, tree.tokens, strict=True))
    return {edge: node for node, edge in reversed(list(nodes))}


def walk(tree: DraftTree, chosen: Sequence[int]) -> list[int]:
    """The verification walk: follow the target's own choices as long as they were drafted.

    Args:
        chosen: the target's choice after the root, then after each node.

    Returns:
        Accepted nodes, root's child first. The tokens of the round are theirs and the target's
        choice at the last of them (the bonus token).
    """
    path: list[int] = []
    last = -1
    for node, edge in enumerate(zip(tree.parents, tree.tokens, strict=True)):
        if edge == (last, chosen[last + 1]):
            path.append(node)
            last = node
    return path
