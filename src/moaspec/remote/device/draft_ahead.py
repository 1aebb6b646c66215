"""Drafts that run ahead of the verified text: while a verdict is under way, or without a link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moaspec.drafting.draft_tree import MAX_SIZES, Chain, DraftTree, Tree
from moaspec.drafting.protocols import Drafter, Features, Need, RowText
from moaspec.remote.protocol.activation_layout import Parts
from moaspec.remote.protocol.position_ranges import Positions
from moaspec.remote.protocol.wire import chain
from moaspec.sampling.params import GREEDY
from moaspec.sampling.token_ids import common_length
from moaspec.support.torch_settings import plain_torch


class AheadDrafter:
    """A `Drafter` of one row that remembers what it expects the text to become.

    Chains are cut out of that expectation, and `extend` makes it longer, one token at a time. It
    holds as long as the target chooses what it says; then drafts are there before they are needed.

    Args:
        inner: drafts.
        needs_memory: whether it can draft nothing before features of some token have come.
        clock: of the time that a draft takes.
    """

    needs: frozenset[Need] = frozenset()
    ROW = 0
    """The only one."""

    def __init__(self, inner: Drafter, *, needs_memory: bool, clock: Callable[[], float]) -> None:
        self.inner: Any = inner
        self.needs_memory, self._clock = needs_memory, clock
        self.held = Positions()
        self.expected: list[int] = []
        self.step_s: float | None = None
        self._verified = 0
        self.sampling = GREEDY
        self._end, self.stops = 0, frozenset[int]()
        self._switches: tuple[int, ...] = ()

    @property
    def can_draft(self) -> bool:
        """Whether anything is known to draft from."""
        return not self.needs_memory or len(self.held) > 0

    def begin(self, *, end: int, stops: frozenset[int], switches: Sequence[int] = ()) -> None:
        """A turn starts.

        Args:
            end: length of the text at which it ends.
            stops: tokens that end it.
            switches: see `Target.rope_switches`; no draft crosses one.
        """
        self._end, self.stops, self._switches = end, stops, tuple(switches)

    def place(self, start: int, parts: Parts) -> None:
        """Take in activations of verified tokens."""
        key, value, layers = parts
        last = None if layers is None else (layers[0], layers[1])
        self.inner.place(self.ROW, start, (key, value), last)
        self.held.add(start, start + key.shape[2])

    def follow(self, text: Sequence[int]) -> bool:
        """The text as it is now verified, its newest token included; whether it was expected."""
        common = common_length(self.expected, text)
        if common < min(len(self.expected), len(text)):
            self.rollback(self.ROW, common)
        hit = common == len(text)
        if not hit:
            self.expected = list(text)
        self._verified = len(text)
        return hit

    @plain_torch()
    def extend(self, count: int = 1) -> bool:
        """Expect more tokens; False where the text ends, or nothing can be drafted."""
        text = self.expected
        end = min([self._end, *(one for one in self._switches if one >= self._verified)])
        count = min(count, end - len(text), MAX_SIZES["depth"])
        if count < 1 or not self.can_draft or self._ended():
            return False
        started = self._clock()
        row = RowText(self.ROW, text, self.sampling)
        (tree,) = self.inner.propose([row], Chain(count))
        if not tree.tokens:
            return False
        took = (self._clock() - started) / len(tree.tokens)
        self.step_s = took if self.step_s is None else 0.9 * self.step_s + 0.1 * took
        text += tree.tokens
        return True

    def _ended(self) -> bool:
        return any(token in self.stops for token in self.ready())

    def ready(self) -> list[int]:
        """Tokens that are expected after the verified ones."""
        return self.expected[self._verified :]

    def propose(self, rows: Sequence[RowText], shape: Tree) -> list[DraftTree]:
        """See `Drafter`; chains come from what is expected, which is extended where it is short."""
        (row,) = rows
        self.follow(row.token_ids)
        if not self.can_draft:
            return [DraftTree()]
        if shape.breadth > 1:
            trees: list[DraftTree] = self.inner.propose(rows, shape)
            return trees
        missing = shape.depth - len(self.ready())
        if missing > 0:
            self.extend(missing)
        return [chain(self.ready()[: shape.depth])]

    def encode(
        self, activations_1N: Any, position_ids_1N: Any, counts: Sequence[int]
    ) -> list[Features]:
        """See `Drafter`; the server encodes."""
        encoded: list[Features] = self.inner.encode(activations_1N, position_ids_1N, counts)
        return encoded

    def observe(self, row: int, features: Features) -> None:
        """See `Drafter`."""
        self.inner.observe(row, features)

    def rollback(self, row: int, length: int) -> None:
        """See `Drafter`."""
        self.expected = self.expected[:length]
        self.held.cut(length)
        self.inner.rollback(row, length)

    def close(self, row: int) -> None:
        """See `Drafter`."""
        self.expected = []
        self.held.cut(0)
        self.inner.close(row)
