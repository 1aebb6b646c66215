"""Chains, trees cut by cost, shapes given as text, and trees made from other trees."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, compress

from moaspec_core.drafting.draft_tree import DraftTree, Tree, candidates, children
from moaspec_core.errors import ShapeError


@dataclass(frozen=True, init=False)
class Chain(Tree):
    """A chain of `length` drafts: a tree of breadth 1."""

    def __init__(self, length: int) -> None:
        super().__init__(depth=length, breadth=1, total_tokens=length)

    def __str__(self) -> str:
        return f"chain:{self.depth}"


DEFAULT_TREE = Tree(depth=1, breadth=2, total_tokens=2)
"""The shape for "auto" without costs, as for drafters other than `MoADrafter`. It pays if a pass
over three tokens takes about as long as one over a single token."""


def parse_shape(text: str) -> Tree:
    """Read "auto", "chain:4" or "tree:6x8x62" (depth, breadth, total tokens; also with commas).

    Raises:
        ShapeError: neither form, or impossible sizes.
    """
    kind, _, sizes = text.partition(":")
    try:
        numbers = [int(size) for size in sizes.replace("x", ",").split(",")] if sizes else []
        if kind == "auto" and not numbers:
            return DEFAULT_TREE
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
class PricedTree(Tree):
    """A tree cut where further drafts cost more than their probabilities promise.

    Drafters without probabilities draft it whole, as a `Tree`.

    Args:
        prices: costs of verifying 1, 2, ... `total_tokens` drafts; see `CostTable.prices`.
        least: least probability of the path to a draft that gets children.

    Raises:
        ShapeError: fewer prices than drafts, or a `least` outside 0..1.
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
        return math.log(self.least) if self.least else -math.inf

    def kept(self, log_p: Sequence[float]) -> int:
        """The number of drafts whose expected accepted tokens most exceed their price."""
        best, count, accepted = 0.0, 0, 0.0
        for number, (score, price) in enumerate(zip(log_p, self.prices, strict=False), start=1):
            accepted += math.exp(score)
            if accepted - price > best and number <= self.total_tokens:
                best, count = accepted - price, number
        return count

    def halved(self) -> PricedTree | None:
        """A tree of half the depth and size; None for a tree of one draft."""
        if self.total_tokens == 1:
            return None
        depth = max(1, self.depth // 2)
        total = min(self.total_tokens // 2, candidates(depth, self.breadth))
        return replace(self, depth=min(depth, total), total_tokens=total)

    def _cut(self, depth: int, breadth: int) -> PricedTree:
        total = min(self.total_tokens, candidates(depth, breadth))
        return replace(self, depth=depth, breadth=breadth, total_tokens=total)


def merged(
    paths: Iterable[Sequence[int]], total_tokens: int, base: DraftTree | None = None
) -> DraftTree:
    """One tree of several continuations; common beginnings are merged.

    Args:
        paths: continuations of the root, the most promising first.
        total_tokens: most nodes; later ones are left out.
        base: a tree to add the paths to; the added nodes count as copied.
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
        num_expanded=0 if base is None else base.num_expanded,
    )


def dropped_nodes(tree: DraftTree, rest: DraftTree) -> list[int]:
    """The nodes of a tree that `rest`, the same tree `without` some nodes, does not have.

    No two nodes may share parent and token.
    """
    places, dropped = {-1: -1}, list[int]()
    kept = [*zip(rest.parents, rest.tokens, strict=True), None]
    for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True)):
        if kept[len(places) - 1] == (places.get(parent), token):
            places[node] = len(places) - 1
        else:
            dropped.append(node)
    return dropped


def beginning(tree: DraftTree, count: int) -> DraftTree:
    """The first `count` nodes of a tree."""
    copied = max(0, tree.num_copied - len(tree.tokens) + count)
    nodes = tree.tokens[:count], tree.parents[:count], copied, tree.levels, tree.num_expanded
    return DraftTree(*nodes, tree.log_p[:count])


def selected(tree: DraftTree, kept: bytes) -> DraftTree:
    """The tree of the nodes whose byte in `kept` is 1; parents of kept nodes must be kept."""
    if (count := kept.find(0)) < 0:
        return tree
    if kept.find(1, count) < 0:
        return beginning(tree, count)
    places = [*accumulate(kept)]
    return DraftTree(
        (*compress(tree.tokens, kept),),
        tuple([places[node] - 1 if node >= 0 else -1 for node in compress(tree.parents, kept)]),
        sum(kept[len(kept) - tree.num_copied :]),
        levels=tree.levels,
        num_expanded=tree.num_expanded,
        log_p=(*compress(tree.log_p, kept),),
    )


def without(tree: DraftTree, cut: Collection[int]) -> DraftTree:
    """The tree without some of its nodes and their descendants."""
    kept = bytearray()
    for node, parent in enumerate(tree.parents):
        kept.append(node not in cut and (parent < 0 or kept[parent] == 1))
    return selected(tree, bytes(kept))


def tree_with(path: Sequence[int], trees: Iterable[DraftTree]) -> tuple[DraftTree, list[int]]:
    """The first tree that contains a path, and the path's nodes in it; else the path as a tree."""
    for tree in trees:
        nodes = nodes_along(path, tree)
        if len(nodes) == len(path):
            return tree, nodes
    return merged([path], len(path)), list(range(len(path)))


def nodes_along(path: Sequence[int], tree: DraftTree) -> list[int]:
    """Nodes of the tree along a path, as far as the tree has it."""
    edges, nodes = children(tree), [-1]
    for token in path:
        node = edges.get((nodes[-1], token))
        if node is None:
            break
        nodes.append(node)
    return nodes[1:]
