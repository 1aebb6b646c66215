"""The local verifier: target, its cache, and the drafter's encoder beside it.

Legend: B rows of one pass, T tokens, L layers, H KV heads, D head dim, N verified tokens of all
rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moaspec.drafting.draft_tree import causal
from moaspec.drafting.kv_cache import KVCache, PassSizes, tree_mask
from moaspec.drafting.protocols import Drafter, Need, VerifyRequest, VerifyResult
from moaspec.engine.accept import Acceptance, accept, accept_greedy
from moaspec.support.torch_settings import plain_torch
from moaspec.target.target import Target

PREFILL_CHUNK_TOKENS = 1024
"""Longest stretch of prompt in one pass; bounds the memory of its mask and activations."""

TOLERATED_PADS = 1.5
"""Tokens of a pass, pads included, over those that are wanted; beyond, long rows are split."""

MIN_WIDTH = 16
"""Rows that are split are at least so wide."""

HEAD_NODES = 256
"""Logits of at most so many nodes (but at least one row's) exist at a time."""


class _Stopwatch:
    """Adds up the seconds spent inside it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._started


@dataclass(frozen=True)
class _Plan:
    """One row's tokens in a pass: the end of `known`, then the tree."""

    request: VerifyRequest
    start: int  # position of the first of these tokens
    tokens: tuple[int, ...]
    num_known: int

    @property
    def positions(self) -> list[int]:
        last = self.start + self.num_known - 1
        depths = self.request.tree.depths if len(self.tokens) > self.num_known else []
        return [*range(self.start, last + 1), *(last + depth for depth in depths)]

    @property
    def length(self) -> int:
        """Tokens of the text, whatever part of it this pass holds."""
        return self.request.text_length or self.request.num_verified + len(self.request.new_tokens)

    @property
    def drafted(self) -> bool:
        """Whether a tree is among the tokens."""
        return len(self.tokens) > self.num_known

    def pieces(self, width: int) -> list[_Plan]:
        """A stretch of text as several plans of `width`, of which the last may be shorter.

        Each sees what those before it write in the same pass, because a layer stores all keys
        before any are read. None but the last has pads, which would be written over the next.
        """
        if self.drafted:
            return [self]
        cuts = range(0, len(self.tokens), width)
        parts = [self.tokens[cut : cut + width] for cut in cuts]
        return [
            _Plan(self.request, self.start + cut, part, len(part))
            for cut, part in zip(cuts, parts, strict=True)
        ]


class LocalVerifier:
    """Verifies drafts with a target in this process.

    Args:
        target: the frozen target.
        drafter: whose encoder runs on verified tokens; None when nothing is drafted.
    """

    def __init__(self, target: Target, drafter: Drafter | None = None) -> None:
        self.target = target
        self._needs: frozenset[Need] = drafter.needs if drafter is not None else frozenset()
        self._encode = drafter.encode if drafter is not None and self._needs else None
        self._texts: dict[int, list[int]] = {}
        self._encoded: dict[int, int] = {}  # tokens of each row whose features were given out
        self._held: dict[int, Tensor] = {}  # final states of later ones, (n, E)
        self._target_time = _Stopwatch()  # in its passes and head, of this call
        self._grows = target.rope_growth is not None
        self._device = target.device  # asking a model takes a walk through its parameters
        self.cache = KVCache(
            num_layers=target.num_layers,
            num_heads=target.num_kv_heads,
            head_dim=target.head_dim,
            dtype=target.dtype,
            device=self._device,
        )

    async def verify(self, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
        """One target pass for all requests (long prompts take several before it)."""
        with plain_torch(), torch.inference_mode(), self.target.threads.limited():
            return self._verify(requests)

    @property
    def cache_bytes(self) -> int:
        """Keys and values held."""
        return self.cache.num_bytes

    def close(self, row: int) -> None:
        """Nothing to do: a row's slots and text are written over by whoever uses it next."""

    def release(self) -> None:
        """Give the cache's memory back; no row may be in use."""
        self.cache.release()
        self._texts.clear()
        self._encoded.clear()
        self._held.clear()

    def _verify(self, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
        self._target_time = _Stopwatch()
        plans, early = self._prefill(requests)
        states = self._states(plans)
        decisions = self._decide(plans, states)
        if "hidden" in self._needs:
            for done, plan, states_TE, decision in zip(
                early, plans, states, decisions, strict=True
            ):
                nodes = [plan.num_known + node for node in decision.accepted]
                done += [states_TE[: plan.num_known], states_TE[nodes]]
        for request, decision in zip(requests, decisions, strict=True):
            root = request.num_verified + len(request.new_tokens) - 1
            slots = [root + 1 + node for node in decision.accepted]
            self.cache.commit(request.row, root + 1, slots)
        started = time.perf_counter()
        accepted = [len(decision.accepted) for decision in decisions]
        features = self._features(requests, accepted, early)
        encode_s = time.perf_counter() - started
        pass_s = self._target_time.seconds if self._device.type == "cpu" else None
        return [
            VerifyResult(
                decision.accepted,
                decision.next_token,
                feature,
                decision.logprobs,
                encode_s,
                decision.top_logprobs,
                pass_s=pass_s,
            )
            for decision, feature in zip(decisions, features, strict=True)
        ]

    def _prefill(self, requests: Sequence[VerifyRequest]) -> tuple[list[_Plan], list[list[Tensor]]]:
        """Run all but the last stretch of long `known` tokens; plan the deciding pass.

        Returns:
            A plan per request, and the final states of what was run, (n, E) each, where needed.
        """
        plans: list[_Plan] = []
        early: list[list[Tensor]] = []
        for request in requests:
            start, known = request.num_verified, request.new_tokens
            early.append([])
            while len(known) > PREFILL_CHUNK_TOKENS:
                chunk, known = known[:PREFILL_CHUNK_TOKENS], known[PREFILL_CHUNK_TOKENS:]
                states_1TE = self._pass([_Plan(request, start, chunk, len(chunk))])
                if "hidden" in self._needs:
                    early[-1].append(states_1TE[0])
                start += len(chunk)
            plans.append(_Plan(request, start, known + request.tree.tokens, len(known)))
        return plans, early

    def _states(self, plans: Sequence[_Plan]) -> list[Tensor]:
        """One pass over all plans: final states of each one's tokens, (n, E)."""
        pieces = [plan.pieces(_width(plans)) for plan in plans]
        hidden_BTE = self._pass([piece for parts in pieces for piece in parts])
        states: list[Tensor] = []
        first = 0
        for parts in pieces:
            own = [hidden_BTE[first + i, : len(one.tokens)] for i, one in enumerate(parts)]
            states.append(_joined(own, 0))
            first += len(parts)
        return states

    def _pass(self, plans: Sequence[_Plan]) -> Tensor:
        """Run the target over every plan's tokens, right-padded: (B, T, E) final states."""
        rows, starts = [p.request.row for p in plans], [p.start for p in plans]
        wanted = max(len(plan.tokens) for plan in plans)
        sizes = PassSizes.of(rows, starts, wanted, recorded=self.target.layers.records)
        longest, visible = sizes.tokens, sizes.visible
        self.cache.reserve(max(rows) + 1, visible)
        tree_BTT = np.stack([_visible_matrix(plan, longest) for plan in plans])
        numbers = [[_padded(p.tokens, longest), _padded(p.positions, longest)] for p in plans]
        tokens_BT, positions_BT = (
            torch.from_numpy(np.array(numbers, np.int64)).to(self._device).unbind(1)
        )
        mask_B1TS = tree_mask(starts, torch.from_numpy(tree_BTT).to(self._device), visible)
        lengths = [p.request.prompt_length if self._grows else p.length for p in plans]
        lengths_B = torch.tensor(lengths, device=self._device)
        with self._target_time:
            return self.target.run(
                tokens_BT,
                positions_BT,
                mask_B1TS=mask_B1TS,
                write=self.cache.writer(rows, starts, longest, visible, steady=sizes.steady),
                lengths_B=lengths_B,
            )

    def _decide(self, plans: Sequence[_Plan], states: Sequence[Tensor]) -> list[Acceptance]:
        """The target's choices along each tree, up to the first that was not drafted."""
        decisions: list[Acceptance] = []
        for group in _groups(plans):
            own = states[len(decisions) : len(decisions) + len(group)]
            needed = [
                states_TE[plan.num_known - 1 :] for plan, states_TE in zip(group, own, strict=True)
            ]
            requests = [plan.request for plan in group]
            states_NE, texts = _joined(needed, 0), [self._text(one) for one in requests]
            if any(one.sampling.needs_logits for one in requests):
                with self._target_time:
                    logits_NV = self.target.head(states_NE)
                decisions += accept(requests, texts, logits_NV)
            else:
                with self._target_time:
                    chosen_N = self.target.best(states_NE).tolist()
                decisions += accept_greedy(requests, texts, chosen_N)
        return decisions

    def _text(self, request: VerifyRequest) -> list[int]:
        """All tokens of a row up to the root; whatever follows `base` is replaced by `known`.

        The walk along the tree appends to it, so that the next round finds what was accepted.
        """
        text = self._texts.setdefault(request.row, [])
        assert len(text) >= request.num_verified, "a row's base is at most what was verified"
        text[request.num_verified :] = request.new_tokens
        return text

    def _features(
        self,
        requests: Sequence[VerifyRequest],
        num_accepted: Sequence[int],
        hidden: Sequence[Sequence[Tensor]],
    ) -> list[object]:
        """The drafter's encoding of all committed tokens of a row that it has not encoded yet."""
        features: list[object] = [None] * len(requests)
        activations: list[Tensor] = []
        positions: list[int] = []
        counts: dict[int, int] = {}
        for i, (request, accepted) in enumerate(zip(requests, num_accepted, strict=True)):
            start = min(self._encoded.get(request.row, 0), request.num_verified)
            self._encoded[request.row] = start
            self._hold(request, start, hidden[i])
            if self._encode is None or not request.encode:
                continue
            stop = request.num_verified + len(request.new_tokens) + accepted
            activations.append(self._activations(request.row, start, stop))
            positions += range(start, stop)
            counts[i] = stop - start
            self._encoded[request.row] = stop
        if self._encode is not None and counts:
            position_ids_1N = torch.tensor([positions], device=self._device)
            joined = _joined(activations, 1)
            encoded = self._encode(joined, position_ids_1N, list(counts.values()))
            for i, feature in zip(counts, encoded, strict=True):
                features[i] = feature
        return features

    def _hold(self, request: VerifyRequest, start: int, fresh: Sequence[Tensor]) -> None:
        """Keep final states from `start` on until they are encoded; no cache has them."""
        if "hidden" in self._needs:
            held = self._held.get(request.row)
            earlier = [] if held is None else [held[: request.num_verified - start]]
            self._held[request.row] = torch.cat([*earlier, *fresh])

    def _activations(self, row: int, start: int, stop: int) -> Tensor:
        """What the drafter encodes of a row's tokens: (1, n, L, K), or final states (1, n, E)."""
        if "hidden" in self._needs:
            return self._held.pop(row)[None]
        return self.cache.features(row, start, stop)


def _width(plans: Sequence[_Plan]) -> int:
    """Tokens of a pass's rows: as many as the longest plan has, unless pads would cost too much."""
    sizes = [len(plan.tokens) for plan in plans]
    if len(sizes) * max(sizes) <= TOLERATED_PADS * sum(sizes):
        return max(sizes)
    return max([MIN_WIDTH, *(len(plan.tokens) for plan in plans if plan.drafted)])


def _groups(plans: Sequence[_Plan]) -> Iterator[list[_Plan]]:
    """Consecutive rows whose nodes fit into one call of the head."""
    group: list[_Plan] = []
    nodes = 0
    for plan in plans:
        own = 1 + len(plan.request.tree.tokens)
        if group and nodes + own > HEAD_NODES:
            yield group
            group, nodes = [], 0
        group.append(plan)
        nodes += own
    yield group


def _visible_matrix(plan: _Plan, longest: int) -> np.ndarray:
    """Who sees whom among the tokens of a pass; pads see whatever comes before them."""
    if not plan.drafted or plan.request.tree.is_chain:
        return causal(longest)
    matrix = causal(longest).copy()
    drafts = slice(plan.num_known, len(plan.tokens))
    matrix[drafts, drafts] = plan.request.tree.ancestors
    return matrix


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """One piece is not copied."""
    return torch.cat(list(parts), dim=dim) if len(parts) > 1 else parts[0]


def _padded(values: Sequence[int], length: int) -> list[int]:
    return [*values, *[0] * (length - len(values))]
