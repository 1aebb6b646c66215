"""Timing of the parts of a round, and of whole rounds.

Legend: B rows, T tokens, E hidden size.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from moaspec.backends.cpu.cpu_attention import MAX_ATTENDED
from moaspec.backends.fast_moa_proposer import FastMoAProposer
from moaspec.drafting.kv_cache import KVCache, PassSizes, tree_mask
from moaspec.engine.recurrent_verifier import local_verifier
from moaspec.target.decoder_layers import Slots, TextPass
from moaspec.target.target import Target
from moaspec_core.drafting.draft_tree import Tree
from moaspec_core.drafting.protocols import RequestText
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.engine.engine import Engine
from moaspec_core.engine.request_state import Event
from moaspec_core.policy.cost_model import CostTable

TEXT = 64  # tokens of the text before the drafts

ENGLISH = (
    "The lighthouse stands on a small island north of the harbour. Every evening its keeper climbs "
    "the stairs, cleans the glass and lights the lamp. Ships that come from the west see it first. "
    "In winter, when the wind is strong, nobody can reach the island for weeks, so the keeper has "
    "to store food, oil and books before the first storm. What he likes most is"
)
"""Text before the drafts. After text like that of a prompt few tokens are likely, which makes the
search for the best one faster (`ArgMax` of the CPU kernels)."""


@dataclass
class TimedPart:
    """A call that can be timed several times."""

    run: Callable[[], object]
    device: torch.device  # its queue is drained before each reading of the clock
    before: Callable[[], object] | None = None  # a call before each `run`, which is not timed
    seconds: list[float] = field(default_factory=list)

    def time(self, *, counts: bool = True) -> None:
        """Run it once and record the time, if it counts."""
        if self.before is not None:
            self.before()
        elapsed = timed(self.run, self.device)[0]
        if counts:
            self.seconds.append(elapsed)

    @property
    def usual_s(self) -> float:
        """The lower quartile: other processes only make times longer."""
        return lower_quartile(self.seconds)


class RoundParts:
    """Makes the parts of a round with any tokens; without proposer, the target's alone."""

    def __init__(self, target: Target, proposer: FastMoAProposer | None) -> None:
        self.target, self.proposer = target, proposer
        self._cache = local_verifier(target).cache

    def target_pass(self, num_tokens: int, context: int) -> TimedPart:
        """A pass over `num_tokens` tokens after `context` others, without the head."""
        run = pass_over(self.target, self._cache, num_tokens, context)
        # After the same pass, as in decoding: weights, keys and values are in the CPU's caches.
        return TimedPart(run, self.target.device, run)

    def head(self, num_tokens: int, *, logits: bool = False) -> TimedPart:
        """The head and its best token, or its logits; after a pass, as in a round."""
        head = self.target.head if logits else self.target.best
        width = int(self.target.config.hidden_size)
        # Not zeros: the search for the best of equal logits takes longer.
        states = torch.ones(num_tokens, width, dtype=self.target.dtype, device=self.target.device)
        return TimedPart(lambda: head(states), self.target.device, self._small_pass)

    def draft(self, shape: Tree, num_rows: int = 1) -> TimedPart:
        """Drafting of one tree for each of `num_rows` rows."""
        assert self.proposer is not None
        proposer, length = self.proposer, self.text_length
        for row in range(num_rows):
            self._encode(length - 1, row)
        rows = [RequestText(row, self.text) for row in range(num_rows)]

        def behind_a_pass() -> None:
            # As in a round, where the pass has filled the CPU's caches with the target's weights.
            self._small_pass()
            proposer.share_target_cache(self._cache)
            for row in range(num_rows):
                proposer.close(row)
                proposer.mark_encoded(row, range(length - 1))
                proposer.num_read[row] = length - 1

        return TimedPart(lambda: proposer.propose(rows, shape), self.target.device, behind_a_pass)

    def encode(self, num_tokens: int) -> TimedPart:
        return TimedPart(partial(self._encode, num_tokens), self.target.device, self._small_pass)

    @property
    def text_length(self) -> int:
        """Tokens of the text before the drafts."""
        return min(TEXT, self.target.max_positions // 2)

    @cached_property
    def text(self) -> list[int]:
        """Tokens before the drafts; zeros without a tokenizer."""
        tokenizer, length = self.target.tokenizer, self.text_length
        ids = [] if tokenizer is None else list(tokenizer(ENGLISH)["input_ids"])
        return [0] * (length - len(ids)) + ids[-length:]

    def _small_pass(self) -> None:
        self.target_pass(1, 1).run()

    def _encode(self, num_tokens: int, row: int = 0) -> None:
        assert self.proposer is not None
        self._cache.reserve(row + 1, num_tokens)
        self.proposer.encode_and_append(self._cache, row, range(num_tokens))


class TimedRounds:
    """Whole rounds after an arbitrary prompt. `shape`: of the drafts; None drafts nothing."""

    def __init__(self, parts: RoundParts, shape: Chain | None) -> None:
        target, self._parts, self._shape = parts.target, parts, shape
        self._verifier = local_verifier(target, parts.proposer)
        self._engine = Engine(self._verifier, parts.proposer, target=target)
        self._rounds: list[tuple[float, Event]] = []

    def time(self, *, counts: bool = True) -> None:
        parts = self._parts
        if parts.proposer is not None:
            parts.proposer.share_target_cache(self._verifier.cache)
            parts.proposer.close(0)
        most = parts.target.max_positions
        self._engine.add(parts.text, max_new_tokens=most, shape=self._shape)
        self._engine.step()
        if self._engine.num_active:
            self._engine.step()  # not timed: its shapes are new to PyTorch
        if self._engine.num_active:
            elapsed, (event,) = timed(self._engine.step, parts.target.device)
            if counts:
                self._rounds.append((elapsed, event))
        self._engine.abort_all()

    def rest_s(self, costs: CostTable) -> float:
        """Seconds of a round less those of its parts; 0 if no round was timed."""
        length = self._parts.text_length
        rests = [0.0] if not self._rounds else []
        for elapsed, event in self._rounds:
            drafts = len(event.tree.tokens)
            parts_s = float(costs.verify_s(1 + drafts, length))
            if drafts:
                parts_s += costs.draft_s(drafts, 1, 1)
                parts_s += float(costs.accept_s(1 + len(event.accepted)))
            rests.append(elapsed - parts_s)
        return max(0.0, lower_quartile(rests))


def pass_over(
    target: Target, cache: KVCache, num_tokens: int, context: int, num_rows: int = 1
) -> Callable[[], Tensor]:
    """A pass over new tokens of each row, after `context` others, as a verifier makes it.

    Returns:
        Final states, (B, T, E).
    """
    text_pass = target.text_pass() if num_rows == 1 and num_tokens <= MAX_ATTENDED else None
    if text_pass is not None:
        cache.reserve(1, context + num_tokens)
        return partial(_text_states, text_pass, cache, num_tokens, context)
    rows, starts = list(range(num_rows)), [context] * num_rows
    sizes = PassSizes.of(rows, starts, num_tokens, recorded=target.layers.records)
    tokens, visible = sizes.tokens, sizes.visible
    cache.reserve(num_rows, visible)
    positions_BT = torch.arange(context, context + tokens, device=target.device).repeat(num_rows, 1)
    chain_TT = torch.ones(tokens, tokens, dtype=torch.bool, device=target.device).tril()

    def run() -> Tensor:
        return target.run(
            torch.zeros_like(positions_BT),
            positions_BT,
            mask_B1TS=tree_mask(starts, chain_TT.expand(num_rows, -1, -1), visible),
            write=cache.writer(rows, starts, tokens, visible, kind=sizes.kind),
        )

    return run


def _text_states(text_pass: TextPass, cache: KVCache, num_tokens: int, context: int) -> Tensor:
    slots = Slots(cache.data, [0], [context], context + num_tokens)
    done = text_pass.run(
        [0] * num_tokens, range(-1, num_tokens - 1), slots, finished=num_tokens, choices=0
    )
    assert done is not None, "the target has hooks"
    return done[0][None]


def lower_quartile(numbers: Sequence[float]) -> float:
    """The number at a quarter of the way from the least to the greatest."""
    return sorted(numbers)[(len(numbers) - 1) // 4]


def timed(run: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Seconds of a call, and what it returned."""
    _synchronise(device)
    started = time.perf_counter()
    result = run()
    _synchronise(device)
    return time.perf_counter() - started, result


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
