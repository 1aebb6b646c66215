"""Drafting ahead of the verified text, while a verdict is awaited or without a link."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from moaspec_core.drafting.draft_tree import MAX_SIZES, DraftTree, Tree
from moaspec_core.drafting.protocols import Proposer, RequestText
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.engine.position_rules import PositionRules
from moaspec_core.sampling.params import GREEDY
from moaspec_core.sampling.token_ids import common_length
from moaspec_core.support.torch_settings import plain_torch
from moaspec_edge.protocol.activation_layout import Activations
from moaspec_edge.protocol.position_ranges import PositionSet
from moaspec_edge.protocol.wire import chain

MAX_NEW = 8
"""Most new tokens of a draft step whose time counts; reading a prompt takes longer."""

MIN_STEPS, NUM_STEPS = 4, 9
"""Timed draft steps before `step_s` is reliable, and the number of latest ones that count."""


class AheadDrafter(Proposer):
    """A `Proposer` of one row that keeps an expected text.

    Drafted chains are slices of the expected text, and `extend` adds tokens to it. While the target
    chooses the expected tokens, drafts are ready before they are needed.

    Args:
        needs_memory: whether it needs features of some token before it can draft.

    Attributes:
        expected: the verified text and the tokens drafted after it.
        received: positions whose activations the drafter has.
    """

    ROW = 0  # the only row

    def __init__(self, inner: Proposer, *, needs_memory: bool, clock: Callable[[], float]) -> None:
        self.inner: Any = inner
        self.needs_memory, self._clock = needs_memory, clock
        self.received = PositionSet()
        self.expected: list[int] = []
        self._steps_s: deque[float] = deque(maxlen=NUM_STEPS)
        self._verified = self._num_read = 0
        self.sampling = GREEDY
        self._end, self.stops = 0, frozenset[int]()
        self._rules = PositionRules(max_positions=0)

    @property
    def can_draft(self) -> bool:
        """Whether the drafter has the features that it needs."""
        return not self.needs_memory or len(self.received) > 0

    @property
    def step_s(self) -> float | None:
        """Time of one drafted token: the median of the latest; None before the first."""
        steps = sorted(self._steps_s)
        return steps[len(steps) // 2] if steps else None

    @property
    def is_measuring(self) -> bool:
        """Whether `step_s` is the median of too few steps to be reliable."""
        return len(self._steps_s) < MIN_STEPS

    @property
    def room(self) -> int:
        """Tokens of the turn that come after the next one."""
        return max(0, self._end - self._verified - 1)

    def begin(self, *, end: int, stops: frozenset[int], rules: PositionRules) -> None:
        """Start a turn.

        Args:
            end: length of the text at which it ends.
            rules: of the target; drafts end before a switch of its rotary embeddings.
        """
        self._end, self.stops, self._rules = end, stops, rules

    def place(self, start: int, activations: Activations) -> None:
        self.inner.place_activations(self.ROW, start, activations)
        self.received.add(start, start + activations.num_tokens)

    def follow(self, text: Sequence[int]) -> bool:
        """Take over the verified text with its newest token; returns whether it was expected."""
        common = common_length(self.expected, text)
        if common < min(len(self.expected), len(text)):
            self.rollback(self.ROW, common)
        hit = common == len(text)
        if not hit:
            self.expected = list(text)
        self._verified = len(text)
        return hit

    def extend(self, count: int = 1) -> bool:
        """Draft more expected tokens; returns False if the text ends or nothing can be drafted."""
        text = self.expected
        end = min(self._end, self._rules.end_of_drafts(self._verified))
        count = min(count, end - len(text), MAX_SIZES["depth"])
        ended = any(token in self.stops for token in self.ready())
        if count < 1 or not self.can_draft or ended:
            return False
        started = self._clock()
        row = RequestText(self.ROW, text, self.sampling)
        with plain_torch():
            (tree,) = self.inner.propose([row], Chain(count))
        if not tree.tokens:
            return False
        self._measure((self._clock() - started) / len(tree.tokens), len(text) - self._num_read)
        text += tree.tokens
        self._num_read = len(text) - 1
        return True

    def _measure(self, step_s: float, num_new: int) -> None:
        """Note a draft step of `step_s` seconds that read `num_new` tokens."""
        known_s = self.step_s
        # A step with many new tokens is an upper bound of one without.
        if num_new <= MAX_NEW or (known_s is not None and step_s < known_s):
            self._steps_s.append(step_s)

    def ready(self) -> list[int]:
        """Expected tokens after the verified text."""
        return self.expected[self._verified :]

    def propose(self, rows: Sequence[RequestText], shape: Tree) -> list[DraftTree]:
        """Chains are slices of the expected text, which is extended if needed."""
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

    def rollback(self, row: int, length: int) -> None:
        """Cut the expected text and the drafter's caches."""
        self.expected = self.expected[:length]
        self._num_read = min(self._num_read, length)
        self.received.cut(length)
        self.inner.rollback(row, length)

    def close(self, row: int) -> None:
        self.expected, self._num_read = [], 0
        self.received.cut(0)
        self.inner.close(row)
