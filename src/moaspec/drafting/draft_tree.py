"""Shapes of drafts, and the drafted trees themselves.

A tree lists its nodes parents first; parent -1 is the root, the newest token, which the target has
already chosen.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from moaspec.errors import ShapeError

MAX_SIZES = {"depth": 128, "breadth": 128, "total_tokens": 1024}
"""Far beyond what pays; larger ones are mistakes, and would draft for minutes."""

_CAUSAL = np.tri(64, dtype=np.bool_)
_CAUSAL.flags.writeable = False


@dataclass(frozen=True)
class Tree:
    """A dynamic tree: expand the best `breadth` leaves per level, keep the best nodes overall.

    Args:
        depth: levels of drafts, so at most `depth` drafts are accepted in a round.
        breadth: leaves expanded per level, and children of each.
        total_tokens: drafts that the target verifies in one pass.

    Raises:
        ShapeError: sizes that no such tree can have, or beyond `MAX_SIZES`.

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
        """Log-probability that a path must have for its last draft to be drafted on."""
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


@dataclass(frozen=True)
class PricedTree(Tree):
    """A tree that is grown and verified as far as the drafter's own probabilities pay for it.

    Args:
        prices: what verifying 1, 2, ... `total_tokens` drafts costs beyond verifying none, in
            tokens that would be written in that time.
        least: probability that a draft must have, together with all above it, to be drafted on.

    It is for drafters with probabilities; others take it as the large `Tree` that it is.

    Raises:
        ShapeError: fewer prices than drafts, or a probability that is none.
    """

    prices: tuple[float, ...] = ()
    least: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.prices) < self.total_tokens or not 0.0 <= self.least <= 1.0:
            raise ShapeError(
                f"A priced tree of {self.total_tokens} drafts needs as many prices, got "
                f"{len(self.prices)}, and `least` within 0..1, got {self.least}."
            )

    @property
    def least_log_p(self) -> float:
        """Limit for drafting on, see `Tree.least_log_p`."""
        return math.log(self.least) if self.least else -math.inf

    def kept(self, log_p: Sequence[float]) -> int:
        """As many as promise the most accepted drafts beyond their price."""
        best, count, accepted = 0.0, 0, 0.0
        for number, (one, price) in enumerate(zip(log_p, self.prices, strict=False), start=1):
            accepted += math.exp(one)
            if accepted - price > best and number <= self.total_tokens:
                best, count = accepted - price, number
        return count

    def halved(self) -> PricedTree | None:
        """Half as deep and large, or None where that is nothing."""
        if self.total_tokens == 1:
            return None
        depth = max(1, self.depth // 2)
        total = min(self.total_tokens // 2, candidates(depth, self.breadth))
        return replace(self, depth=min(depth, total), total_tokens=total)

    def _cut(self, depth: int, breadth: int) -> PricedTree:
        total = min(self.total_tokens, candidates(depth, breadth))
        return replace(self, depth=depth, breadth=breadth, total_tokens=total)


def candidates(depth: int, breadth: int) -> int:
    """Nodes that a tree of these sizes is chosen from."""
    return breadth + (depth - 1) * breadth**2


@dataclass(frozen=True, init=False)
class Chain(Tree):
    """A chain of `length` drafts: a tree of breadth 1."""

    def __init__(self, length: int) -> None:
        super().__init__(depth=length, breadth=1, total_tokens=length)

    def __str__(self) -> str:
        return f"chain:{self.depth}"


AUTO = Tree(depth=1, breadth=2, total_tokens=2)
"""What "auto" means as long as machines are not calibrated: it pays wherever a pass over three
tokens costs about as much as one over a single token. Where more are as cheap (GPUs, CPUs
with bf16 instructions) a larger tree pays more."""


def parse_shape(text: str) -> Tree:
    """Read "auto", "chain:4" or "tree:6x8x62": depth, breadth and total tokens, also with commas.

    Raises:
        ShapeError: neither form, or impossible sizes.
    """
    kind, _, sizes = text.partition(":")
    try:
        numbers = [int(size) for size in sizes.replace("x", ",").split(",")] if sizes else []
        if kind == "auto" and not numbers:
            return AUTO
        if kind == "chain" and len(numbers) == 1:
            return Chain(numbers[0])
        if kind == "tree" and len(numbers) == 3:
            return Tree(*numbers)
    except ShapeError:
        raise
    except ValueError:
        pass
    raise ShapeError(
        f"Cannot read the draft shape {text!r}; use auto, chain:LENGTH or "
        "tree:DEPTHxBREADTHxTOTAL, for example tree:6x8x62."
    )


@dataclass(frozen=True)
class DraftTree:
    """Drafted tokens and each one's parent (index into `tokens`, -1: the root).

    Attributes:
        tokens: by node.
        parents: by node, each before its children.
        num_copied: number of nodes at the end that come from n-gram branches, not from the drafter.
        levels: number of drafted levels, 0 if unknown; the deepest may have no node here.
        num_read: number of drafted nodes that got children, here or not.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    num_copied: int = 0
    levels: int = 0
    num_read: int = 0

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
        """The `ancestor_matrix` of the parents."""
        return causal(len(self.parents)) if self.is_chain else ancestor_matrix(self.parents)


def causal(size: int) -> npt.NDArray[np.bool_]:
    """[i, j] is True when j is at most i; to be read only."""
    return _CAUSAL[:size, :size] if size <= len(_CAUSAL) else np.tri(size, dtype=np.bool_)


def ancestor_matrix(parents: Sequence[int]) -> npt.NDArray[np.bool_]:
    """[i, j] is True when node j is i itself or one of its ancestors."""
    above = np.array([*parents, -1])  # the last entry is where -1 points: the root is its own
    nodes = np.arange(len(parents))
    matrix = np.zeros((len(parents), len(parents) + 1), dtype=np.bool_)
    level = nodes
    while (level >= 0).any():
        matrix[nodes, level] = True
        level = above[level]
    return matrix[:, :-1]


def merged(
    paths: Iterable[Sequence[int]], total_tokens: int, base: DraftTree | None = None
) -> DraftTree:
    """One tree of several continuations, which share their common beginnings.

    Args:
        paths: continuations of the root, the most promising first.
        total_tokens: nodes at most; what comes after them is left out.
        base: a tree to add them to; what they add to it counts as copied.
    """
    nodes = [] if base is None else list(zip(base.parents, base.tokens, strict=True))
    known = {} if base is None else children(base)
    for path in paths:
        parent = -1
        for token in path:
            if (parent, token) not in known:
                if len(nodes) >= total_tokens:
                    break
                known[parent, token] = len(nodes)
                nodes.append((parent, token))
            parent = known[parent, token]
    added = 0 if base is None else len(nodes) - len(base.tokens) + base.num_copied
    return DraftTree(
        tuple(token for _, token in nodes),
        tuple(node for node, _ in nodes),
        added,
        levels=0 if base is None else base.levels,
        num_read=0 if base is None else base.num_read,
    )


def without(tree: DraftTree, cut: Collection[int]) -> DraftTree:
    """A tree less some of its nodes and what hangs below them."""
    places = {-1: -1}
    for node, parent in enumerate(tree.parents):
        if parent in places and node not in cut:
            places[node] = len(places) - 1
    kept = [node for node in places if node >= 0]
    own = len(tree.tokens) - tree.num_copied
    return DraftTree(
        tuple(tree.tokens[node] for node in kept),
        tuple(places[tree.parents[node]] for node in kept),
        sum(node >= own for node in kept),
        levels=tree.levels,
        num_read=tree.num_read,
    )


def children(tree: DraftTree) -> dict[tuple[int, int], int]:
    """Node by (parent, token); where a token was drafted twice, the first node counts."""
    nodes = enumerate(zip(tree.parents, tree.tokens, strict=True))
    return {edge: node for node, edge in reversed(list(nodes))}


def walk(tree: DraftTree, chosen: Sequence[int]) -> list[int]:
    """The verification walk: follow the target's own choices as long as they were drafted.

    Args:
        tree: what was drafted.
        chosen: the target's choice after the root, then after each node.

    Returns:
        Accepted nodes, root's child first. The tokens of the round are theirs and the target's
        choice at the last of them (the bonus token).
    """
    known = children(tree)
    path: list[int] = []
    node = -1
    while (node := known.get((node, chosen[node + 1]), -2)) >= 0:
        path.append(node)
    return path
