"""Verification with a target in this process, its KV cache, and the drafter's encoder.

Legend: B rows of one pass, T tokens, L layers, H KV heads, D head dim, E hidden size, N verified
tokens or tree nodes of all requests, K keys and values of one layer.
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
from moaspec.engine.position_rules import PositionRules
from moaspec.support.torch_settings import plain_torch
from moaspec.target.target import Target

PREFILL_CHUNK_TOKENS = 1024
"""Most prompt tokens in one pass; bounds the memory of its mask and activations."""

MAX_PAD_RATIO = 1.5
"""Limit of the tokens of a pass, with pads, over its tokens without; beyond it long rows are
split."""

MIN_SPLIT_TOKENS = 16
"""Fewest tokens of a row that is split."""

MAX_HEAD_NODES = 256
"""Most nodes whose logits exist at a time (but at least one request's)."""


class _Stopwatch:
    """Sums the seconds of the blocks that it is entered for."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._started


@dataclass(frozen=True)
class _PassRow:
    """One row of a pass: the last of a request's new tokens, then its tree.

    Attributes:
        request: the request.
        start: position of the first token.
        tokens: new tokens, then drafts.
        num_new: how many of them are new tokens.
    """

    request: VerifyRequest
    start: int
    tokens: tuple[int, ...]
    num_new: int

    @property
    def positions(self) -> list[int]:
        """The position of each token; a draft's is that of its depth below the root."""
        last = self.start + self.num_new - 1
        depths = self.request.tree.depths if self.drafted else []
        return [*range(self.start, last + 1), *(last + depth for depth in depths)]

    @property
    def text_length(self) -> int:
        """Tokens of the whole text; the pass may hold only a part of them."""
        return self.request.text_length or self.request.num_verified + len(self.request.new_tokens)

    @property
    def drafted(self) -> bool:
        """Whether the row has drafts."""
        return len(self.tokens) > self.num_new

    def split(self, width: int) -> list[_PassRow]:
        """This row split into rows of `width` tokens; the last one may be shorter.

        Each attends to the rows before it in the same pass, because a layer stores all keys before
        it computes attention. Only the last has pads, since pads overwrite the slots behind a row.
        """
        if self.drafted:
            return [self]
        cuts = range(0, len(self.tokens), width)
        parts = [self.tokens[cut : cut + width] for cut in cuts]
        return [
            _PassRow(self.request, self.start + cut, part, len(part))
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
        self._encoded: dict[int, int] = {}  # by row, tokens whose features were returned
        self._held: dict[int, Tensor] = {}  # final states of later tokens, (n, E)
        self._target_time = _Stopwatch()  # passes and head of the current call
        self._rules = PositionRules.of(target)
        self._device = target.device  # `device` of a module searches its parameters
        self.cache = KVCache.of(target)

    async def verify(self, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
        """One target pass for all requests (long prompts take several before it)."""
        with plain_torch(), torch.inference_mode(), self.target.threads.limited():
            return self._verify(requests)

    @property
    def cache_bytes(self) -> int:
        """Keys and values held."""
        return self.cache.num_bytes

    def close(self, row: int) -> None:
        """Does nothing: the next request in this row overwrites its slots and text."""

    def release(self) -> None:
        """Free the cache's memory; no row may be in use."""
        self.cache.release()
        self._texts.clear()
        self._encoded.clear()
        self._held.clear()

    def _verify(self, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
        self._target_time = _Stopwatch()
        rows, early = self._prefill(requests)
        states = self._states(rows)
        decisions = self._decide(rows, states)
        if "hidden" in self._needs:
            for done, row, states_TE, decision in zip(early, rows, states, decisions, strict=True):
                nodes = [row.num_new + node for node in decision.accepted]
                done += [states_TE[: row.num_new], states_TE[nodes]]
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

    def _prefill(
        self, requests: Sequence[VerifyRequest]
    ) -> tuple[list[_PassRow], list[list[Tensor]]]:
        """Process all but the last chunk of long prompts.

        Returns:
            A row per request for the pass that decides, and the final states of the processed
            tokens, (n, E) each, if the drafter needs them.
        """
        rows: list[_PassRow] = []
        early: list[list[Tensor]] = []
        for request in requests:
            start, tokens = request.num_verified, request.new_tokens
            early.append([])
            while len(tokens) > PREFILL_CHUNK_TOKENS:
                chunk, tokens = tokens[:PREFILL_CHUNK_TOKENS], tokens[PREFILL_CHUNK_TOKENS:]
                states_1TE = self._pass([_PassRow(request, start, chunk, len(chunk))])
                if "hidden" in self._needs:
                    early[-1].append(states_1TE[0])
                start += len(chunk)
            rows.append(_PassRow(request, start, tokens + request.tree.tokens, len(tokens)))
        return rows, early

    def _states(self, rows: Sequence[_PassRow]) -> list[Tensor]:
        """One pass over all rows: the final states of each one's tokens, (n, E)."""
        split = [row.split(_width(rows)) for row in rows]
        hidden_BTE = self._pass([part for parts in split for part in parts])
        states: list[Tensor] = []
        first = 0
        for parts in split:
            own = [hidden_BTE[first + i, : len(part.tokens)] for i, part in enumerate(parts)]
            states.append(_joined(own, 0))
            first += len(parts)
        return states

    def _pass(self, rows: Sequence[_PassRow]) -> Tensor:
        """Run the target over the tokens of all rows, right-padded: (B, T, E) final states."""
        cache_rows, starts = [row.request.row for row in rows], [row.start for row in rows]
        wanted = max(len(row.tokens) for row in rows)
        sizes = PassSizes.of(cache_rows, starts, wanted, recorded=self.target.layers.records)
        longest, visible = sizes.tokens, sizes.visible
        self.cache.reserve(max(cache_rows) + 1, visible)
        tree_BTT = np.stack([_visible_matrix(row, longest) for row in rows])
        numbers = [[_padded(row.tokens, longest), _padded(row.positions, longest)] for row in rows]
        tokens_BT, positions_BT = (
            torch.from_numpy(np.array(numbers, np.int64)).to(self._device).unbind(1)
        )
        mask_B1TS = tree_mask(starts, torch.from_numpy(tree_BTT).to(self._device), visible)
        lengths = [
            self._rules.rope_length(row.request.prompt_length, row.text_length) for row in rows
        ]
        lengths_B = torch.tensor(lengths, device=self._device)
        with self._target_time:
            return self.target.run(
                tokens_BT,
                positions_BT,
                mask_B1TS=mask_B1TS,
                write=self.cache.writer(cache_rows, starts, longest, visible, steady=sizes.steady),
                lengths_B=lengths_B,
            )

    def _decide(self, rows: Sequence[_PassRow], states: Sequence[Tensor]) -> list[Acceptance]:
        """Accept the drafts of each tree that the target chooses itself."""
        decisions: list[Acceptance] = []
        for group in _groups(rows):
            own = states[len(decisions) : len(decisions) + len(group)]
            needed = [
                states_TE[row.num_new - 1 :] for row, states_TE in zip(group, own, strict=True)
            ]
            requests = [row.request for row in group]
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
        """All tokens of a request up to the root: the verified ones, then `new_tokens`.

        Acceptance appends to it, so that the next round finds the accepted tokens.
        """
        text = self._texts.setdefault(request.row, [])
        assert len(text) >= request.num_verified, "num_verified exceeds the text"
        text[request.num_verified :] = request.new_tokens
        return text

    def _features(
        self,
        requests: Sequence[VerifyRequest],
        num_accepted: Sequence[int],
        hidden: Sequence[Sequence[Tensor]],
    ) -> list[object]:
        """The drafter's encoding of all verified tokens that it has not encoded yet."""
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
        """Keep final states from `start` on until they are encoded; no cache holds them."""
        if "hidden" in self._needs:
            held = self._held.get(request.row)
            earlier = [] if held is None else [held[: request.num_verified - start]]
            self._held[request.row] = torch.cat([*earlier, *fresh])

    def _activations(self, row: int, start: int, stop: int) -> Tensor:
        """The encoder's input: keys and values (1, n, L, K), or final states (1, n, E)."""
        if "hidden" in self._needs:
            return self._held.pop(row)[None]
        return self.cache.features(row, start, stop)


def _width(rows: Sequence[_PassRow]) -> int:
    """Tokens of each row of a pass: those of the longest, unless pads would cost too much."""
    sizes = [len(row.tokens) for row in rows]
    if len(sizes) * max(sizes) <= MAX_PAD_RATIO * sum(sizes):
        return max(sizes)
    return max([MIN_SPLIT_TOKENS, *(len(row.tokens) for row in rows if row.drafted)])


def _groups(rows: Sequence[_PassRow]) -> Iterator[list[_PassRow]]:
    """Split rows into groups whose nodes fit into one call of the head."""
    group: list[_PassRow] = []
    nodes = 0
    for row in rows:
        own = 1 + len(row.request.tree.tokens)
        if group and nodes + own > MAX_HEAD_NODES:
            yield group
            group, nodes = [], 0
        group.append(row)
        nodes += own
    yield group


def _visible_matrix(row: _PassRow, longest: int) -> np.ndarray:
    """Which tokens of a pass each token attends to; pads attend to all tokens before them."""
    if not row.drafted or row.request.tree.is_chain:
        return causal(longest)
    matrix = causal(longest).copy()
    drafts = slice(row.num_new, len(row.tokens))
    matrix[drafts, drafts] = row.request.tree.ancestors
    return matrix


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """The concatenation; a single part is not copied."""
    return torch.cat(list(parts), dim=dim) if len(parts) > 1 else parts[0]


def _padded(values: Sequence[int], length: int) -> list[int]:
    return [*values, *[0] * (length - len(values))]
