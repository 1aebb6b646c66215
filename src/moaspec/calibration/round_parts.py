"""Parts of a round, each to be timed by itself, and whole rounds beside them.

Legend: B rows (one here), T tokens, L layers, K one layer's key and value.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from moaspec.drafting.draft_tree import Chain, Tree
from moaspec.drafting.kv_cache import PassSizes, tree_mask
from moaspec.drafting.moa_proposer import MoAProposer
from moaspec.drafting.policy.cost_model import CostTable
from moaspec.drafting.policy.policies import FixedPolicy
from moaspec.drafting.protocols import RowText
from moaspec.engine.engine import Engine
from moaspec.engine.local_verifier import LocalVerifier
from moaspec.engine.result import Event
from moaspec.target.target import Target

TEXT = 64
"""Tokens of the text that is drafted for."""


@dataclass
class TimedPart:
    """Something that can be timed again and again.

    Attributes:
        run: what is timed.
        device: which is waited for.
        before: what is run before each time, and does not count.
        seconds: all times that count.
    """

    run: Callable[[], object]
    device: torch.device
    before: Callable[[], object] | None = None
    seconds: list[float] = field(default_factory=list)

    def time(self, *, counts: bool = True) -> None:
        """Run it once."""
        if self.before is not None:
            self.before()
        elapsed = timed(self.run, self.device)[0]
        if counts:
            self.seconds.append(elapsed)

    @property
    def median_s(self) -> float:
        """Of the times that count."""
        return statistics.median(self.seconds)


class RoundParts:
    """Makes parts, on made-up tokens: costs do not depend on which they are.

    Args:
        target: what is timed.
        drafting: the same; None where only the target is.
    """

    def __init__(self, target: Target, drafting: MoAProposer | None) -> None:
        self.target, self.drafting = target, drafting
        self._cache = LocalVerifier(target).cache

    def target_pass(self, num_tokens: int, context: int) -> TimedPart:
        """A pass over so many tokens after `context` others, behind one like it; no head."""
        target, device, cache = self.target, self.target.device, self._cache
        sizes = PassSizes.of([0], [context], num_tokens, recorded=target.layers.records)
        tokens, visible = sizes.tokens, sizes.visible
        cache.reserve(1, visible)
        positions_1T = torch.arange(context, context + tokens, device=device)[None]
        chain_1TT = torch.ones(1, tokens, tokens, dtype=torch.bool, device=device).tril()

        def run() -> None:
            target.run(
                torch.zeros_like(positions_1T),
                positions_1T,
                mask_B1TS=tree_mask([context], chain_1TT, visible),
                write=cache.writer([0], [context], tokens, visible, steady=sizes.steady),
            )

        # As in decoding, where the last pass has just read the same weights, keys and values.
        return TimedPart(run, device, run)

    def head(self, num_tokens: int, *, logits: bool = False) -> TimedPart:
        """The head and its best token, or its logits; behind a pass, as in a round."""
        head = self.target.head if logits else self.target.best
        width = int(self.target.config.hidden_size)
        # Not zeros, whose logits are all equal: to find the best of these takes longer.
        states = torch.ones(num_tokens, width, dtype=self.target.dtype, device=self.target.device)
        return TimedPart(lambda: head(states), self.target.device, self._small_pass)

    def draft(self, shape: Tree) -> TimedPart:
        """TreeProposer a tree."""
        assert self.drafting is not None
        drafting, length = self.drafting, self.text_length
        features = self._features(length - 1)
        row = RowText(0, [0] * length)

        def behind_a_pass() -> None:
            # In a round, the target's weights have just gone through the caches.
            self._small_pass()
            drafting.share_target_cache(self._cache)
            drafting.close(0)
            drafting.observe(0, features)
            drafting.num_read[0] = length - 1

        return TimedPart(lambda: drafting.propose([row], shape), self.target.device, behind_a_pass)

    def encode(self, num_tokens: int) -> TimedPart:
        """Encoding so many verified tokens."""
        return TimedPart(partial(self._features, num_tokens), self.target.device, self._small_pass)

    @property
    def text_length(self) -> int:
        """Tokens of a made-up text."""
        return min(TEXT, self.target.max_positions // 2)

    def _small_pass(self) -> None:
        self.target_pass(1, 1).run()

    def _features(self, num_tokens: int) -> Any:
        assert self.drafting is not None
        target = self.target
        kv_1TLK = torch.zeros(
            (1, num_tokens, target.num_layers, target.identity.kv_size),
            dtype=target.dtype,
            device=target.device,
        )
        positions = torch.arange(num_tokens, device=target.device)[None]
        (features,) = self.drafting.encode(kv_1TLK, positions, [num_tokens])
        return features


class TimedRounds:
    """Whole rounds, which write the target's own answer to a made-up prompt.

    Args:
        bench: of the parts.
        shape: what is drafted in each; None for none.
    """

    def __init__(self, bench: RoundParts, shape: Chain | None) -> None:
        target, self._bench, self._shape = bench.target, bench, shape
        self._verifier = LocalVerifier(target, bench.drafting)
        self._engine = Engine(self._verifier, bench.drafting, target=target)
        self._seen: list[tuple[float, Event]] = []

    def time(self, *, counts: bool = True) -> None:
        """Make one round of a new text."""
        bench = self._bench
        if bench.drafting is not None:
            bench.drafting.share_target_cache(self._verifier.cache)
            bench.drafting.close(0)
        shape = FixedPolicy(self._shape)
        most = bench.target.max_positions
        self._engine.add([0] * bench.text_length, max_new_tokens=most, shape=shape)
        self._engine.step()
        if self._engine.num_active:
            self._engine.step()  # its shapes are new to the machine
        if self._engine.num_active:
            elapsed, (event,) = timed(self._engine.step, bench.target.device)
            if counts:
                self._seen.append((elapsed, event))
        self._engine.abort_all()

    def rest_s(self, costs: CostTable) -> float:
        """Seconds of a round beyond what its parts take; 0 where no round was seen."""
        length = self._bench.text_length
        rests = [0.0] if not self._seen else []
        for elapsed, event in self._seen:
            drafts = len(event.tree.tokens)
            parts_s = float(costs.verify_s(1 + drafts, length))
            if drafts:
                parts_s += costs.draft_s(drafts, 1, 1)
                parts_s += float(costs.accept_s(1 + len(event.accepted)))
            rests.append(elapsed - parts_s)
        return max(0.0, statistics.median(rests))


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
