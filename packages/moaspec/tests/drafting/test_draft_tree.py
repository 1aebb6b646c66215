"""Shapes of drafts, drafted trees and the verification walk."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moaspec_core.drafting.draft_tree import DraftTree, Tree, ancestor_matrix, walk
from moaspec_core.drafting.tree_shapes import (
    DEFAULT_TREE,
    Chain,
    PricedTree,
    dropped_nodes,
    parse_shape,
    selected,
    without,
)
from moaspec_core.errors import InputError, ShapeError


@st.composite
def draft_trees(draw: st.DrawFn, max_nodes: int = 12) -> DraftTree:
    """Any tree whose parents come first; siblings may repeat a token."""
    size = draw(st.integers(0, max_nodes))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(size))
    tokens = tuple(draw(st.integers(0, 3)) for _ in range(size))
    return DraftTree(tokens, parents)


@pytest.mark.parametrize(
    "sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (3, 2, 2), (2, 2, 7), (-1, 8, 62), (1, 3, 4)]
)
def test_impossible_trees(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ShapeError):
        Tree(*sizes)


@pytest.mark.parametrize("size", [2.0, "2", None, True])
def test_sizes_are_integers(size: object) -> None:
    with pytest.raises(ShapeError, match="integer"):
        Tree(depth=size, breadth=1, total_tokens=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["chain:99999", "tree:129,1,129", "tree:2,129,9", "tree:9,99,1025"]
)
def test_sizes_have_bounds(text: str) -> None:
    with pytest.raises(ShapeError, match="must be an integer within"):
        parse_shape(text)


PRICED = PricedTree(4, 2, 8, prices=(0.1, 0.2, 0.9, 0.95, 1.0, 1.1, 1.2, 2.0), least=0.3)


@pytest.mark.parametrize(
    ("probabilities", "kept"),
    [
        ([], 0),
        ([0.05], 0),  # less than it costs
        ([0.5], 1),
        ([0.5, 0.2], 2),
        ([0.5, 0.2, 0.15], 2),  # the third is dear
        ([0.9, 0.8, 0.4, 0.4, 0.4], 5),  # but pays together with those that follow
        ([0.9] * 20, 8),
    ],
)
def test_a_priced_tree_keeps_what_pays(probabilities: list[float], kept: int) -> None:
    assert PRICED.kept([math.log(one) for one in probabilities]) == kept


def test_a_priced_tree_stays_one_when_it_is_cut() -> None:
    limited, narrowed = PRICED.limited(2), PRICED.narrowed(1)
    assert isinstance(limited, PricedTree)
    assert isinstance(narrowed, PricedTree)
    assert (limited.depth, limited.breadth, limited.total_tokens) == (2, 2, 6)
    assert (narrowed.depth, narrowed.breadth, narrowed.total_tokens) == (4, 1, 4)
    assert limited.prices == narrowed.prices == PRICED.prices
    assert narrowed.kept([0.0] * 9) == 4
    assert PRICED.limited(0) is None


def test_a_priced_tree_is_halved_down_to_one_draft() -> None:
    sizes, tree = [], PRICED.halved()
    while tree is not None:
        sizes.append((tree.depth, tree.total_tokens))
        tree = tree.halved()
    assert sizes == [(2, 4), (1, 2), (1, 1)]


@pytest.mark.parametrize(("prices", "least"), [((), 0.1), ((0.1, 0.2), 1.5), ((0.1, 0.2), -0.1)])
def test_priced_trees_without_a_price(prices: tuple[float, ...], least: float) -> None:
    with pytest.raises(ShapeError, match="needs as many prices"):
        PricedTree(2, 2, 2, prices=prices, least=least)


def test_where_drafting_on_begins() -> None:
    assert PRICED.least_log_p == math.log(0.3)
    assert Chain(3).least_log_p == PricedTree(1, 1, 1, prices=(0.0,)).least_log_p == -math.inf


def test_narrowed() -> None:
    tree = Tree(3, 4, 30)
    assert tree.narrowed(4) is tree
    assert tree.narrowed(2) == Tree(3, 2, 10)
    assert tree.narrowed(1) == Tree(3, 1, 3)


def test_a_chain_is_a_tree_of_breadth_one() -> None:
    chain = Chain(4)
    assert (chain.depth, chain.breadth, chain.total_tokens) == (4, 1, 4)
    with pytest.raises(ShapeError):
        Chain(0)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("auto", DEFAULT_TREE),
        ("chain:4", Chain(4)),
        ("tree:6x8x62", Tree(6, 8, 62)),
        ("tree:6,8,62", Tree(6, 8, 62)),
    ],
)
def test_parse_shape(text: str, shape: Tree) -> None:
    assert parse_shape(text) == shape


@pytest.mark.parametrize("shape", [Chain(4), Tree(6, 8, 62)], ids=str)
def test_a_shape_prints_as_it_is_read(shape: Tree) -> None:
    assert parse_shape(str(shape)) == shape


@pytest.mark.parametrize(
    "text",
    ["", "auto:3", "chain", "chain:", "chain:1,2", "chain:a", "tree:6,8", "tree:6,,8", "bush:1"],
)
def test_unreadable_shapes(text: str) -> None:
    with pytest.raises(ShapeError, match="draft shape"):
        parse_shape(text)


def test_readable_but_impossible_shape() -> None:
    with pytest.raises(InputError, match="depth"):
        parse_shape("tree:3,2,1")


def test_limited() -> None:
    tree = Tree(3, 2, 8)
    assert tree.limited(5) is tree
    assert tree.limited(3) is tree
    assert tree.limited(2) == Tree(2, 2, 6)
    assert tree.limited(1) == Tree(1, 2, 2)
    assert tree.limited(0) is None
    assert tree.limited(-1) is None


@given(st.integers(1, 6), st.integers(1, 5), st.data())
def test_every_limited_tree_is_possible(depth: int, breadth: int, data: st.DataObject) -> None:
    most = breadth + (depth - 1) * breadth**2
    tree = Tree(depth, breadth, data.draw(st.integers(depth, most)))
    for levels in range(1, depth):
        cut = tree.limited(levels)
        assert cut is not None
        assert cut.depth == levels
        assert cut.total_tokens <= tree.total_tokens


def test_depths_and_ancestors() -> None:
    tree = DraftTree(tokens=(7, 8, 9, 7), parents=(-1, 0, -1, 1))
    assert tree.depths == [1, 2, 1, 3]
    assert ancestor_matrix(tree.parents).astype(int).tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [1, 1, 0, 1],
    ]


def test_an_empty_tree() -> None:
    assert DraftTree().depths == []
    assert ancestor_matrix(()).shape == (0, 0)
    assert walk(DraftTree(), [5]) == []


@given(draft_trees())
def test_ancestors_follow_parents(tree: DraftTree) -> None:
    matrix = ancestor_matrix(tree.parents)
    for node in range(len(tree.tokens)):
        path = set()
        at = node
        while at >= 0:
            path.add(at)
            at = tree.parents[at]
        assert set(np.flatnonzero(matrix[node]).tolist()) == path
        assert tree.depths[node] == len(path)


def test_walk_takes_the_targets_choices() -> None:
    tree = DraftTree(tokens=(1, 2, 3, 4), parents=(-1, -1, 1, 2))
    assert walk(tree, [2, 0, 3, 4, 9]) == [1, 2, 3]
    assert walk(tree, [2, 0, 3, 0, 9]) == [1, 2]
    assert walk(tree, [1, 3, 0, 0, 0]) == [0]
    assert walk(tree, [9, 3, 0, 0, 0]) == []


@given(draft_trees(), st.lists(st.integers(0, 3), min_size=13, max_size=13))
def test_walk_is_the_only_path_that_agrees(tree: DraftTree, chosen: list[int]) -> None:
    path = walk(tree, chosen)
    node = -1
    for step in path:
        assert tree.parents[step] == node
        assert tree.tokens[step] == chosen[node + 1]
        node = step
    leaves = [t for t, p in zip(tree.tokens, tree.parents, strict=True) if p == node]
    assert chosen[node + 1] not in leaves


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """Every node as the tokens from the root to it."""
    known: list[tuple[int, ...]] = []
    for parent, token in zip(tree.parents, tree.tokens, strict=True):
        known.append((*(known[parent] if parent >= 0 else ()), token))
    return known


@given(draft_trees(), st.sets(st.integers(0, 11)), st.integers(0, 12))
def test_a_tree_without_some_nodes(tree: DraftTree, cut: set[int], copied: int) -> None:
    copied = min(copied, len(tree.tokens))
    rest = without(DraftTree(tree.tokens, tree.parents, copied), cut)
    gone = ancestor_matrix(tree.parents)[:, [node for node in cut if node < len(tree.tokens)]]
    kept = [node for node in range(len(tree.tokens)) if not gone[node].any()]
    assert paths(rest) == [paths(tree)[node] for node in kept]
    flags = bytes(not one.any() for one in gone)
    assert selected(DraftTree(tree.tokens, tree.parents, copied), flags) == rest
    if len({*paths(tree)}) == len(tree.tokens):
        assert without(tree, dropped_nodes(tree, rest)) == replace(rest, num_copied=0)
    assert rest.num_copied == sum(node >= len(tree.tokens) - copied for node in kept)
