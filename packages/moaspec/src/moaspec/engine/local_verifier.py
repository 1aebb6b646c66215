"""Verification with a target in this process, its KV cache, and the drafter's encoder.

Legend: B rows of one pass, T tokens, S visible slots, L layers, E hidden size, N verified tokens or
tree nodes of all requests, K one layer's key and value.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from moaspec.drafting.kv_cache import KVCache, KVWriter, PassSizes, tree_mask
from moaspec.engine.accept import accept, accept_greedy, alternatives
from moaspec.target.decoder_layers import Slots
from moaspec.target.target import Target, plain_torch
from moaspec_core.drafting.draft_tree import causal
from moaspec_core.drafting.protocols import (
    CachingProposer,
    Need,
    Proposer,
    Verifier,
    VerifyRequest,
    VerifyResult,
)
from moaspec_core.engine.position_rules import PositionRules
from moaspec_core.sampling.params import Alternatives, TextLogprobs

CPU_PROMPT_TOKENS, GPU_PROMPT_TOKENS = 256, 2048
"""See `Verifier.prompt_tokens`."""

PREFILL_CHUNK_TOKENS = 1024
"""Most prompt tokens in one pass; bounds the memory of its mask and activations."""

MAX_PAD_RATIO = 1.5
"""Largest ratio of a pass's tokens, pads included, to its real tokens; above it long rows are
split."""

MIN_SPLIT_TOKENS = 16  # least length of the parts into which a prompt is split
MAX_HEAD_NODES = 256  # most nodes in one call of the head, unless one request has more

CPU_CLIENT_ROWS = 4
CPU_CLIENT_TOKENS = 16
"""Rows and tokens that a CPU computes in about the time in which it reads the weights."""


@dataclass(frozen=True)
class PassRow:
    """One row of a pass: a request's new tokens (of a long prompt, one chunk), then its drafts."""

    request: VerifyRequest
    start: int  # position of the first token
    tokens: tuple[int, ...]  # new tokens, then drafts, which only a prompt's last chunk has
    num_new: int  # how many of them are new tokens

    @property
    def positions(self) -> list[int]:
        """The position of each token; a draft's is the root's plus its depth."""
        last = self.start + self.num_new - 1
        depths = self.request.tree.depths if self.drafted else []
        return [*range(self.start, last + 1), *(last + depth for depth in depths)]

    @property
    def text_length(self) -> int:
        """Tokens of the whole text; the pass may hold only a part of them."""
        return self.request.text_length or self.request.num_verified + len(self.request.new_tokens)

    @property
    def drafted(self) -> bool:
        return len(self.tokens) > self.num_new


class HiddenStates:
    """The final states of each cache row that were not encoded yet.

    For drafters that read them instead of keys and values (EAGLE).
    """

    def __init__(self) -> None:
        self._states: dict[int, tuple[int, Tensor]] = {}

    def add(self, row: int, position: int, states_TE: Tensor) -> None:
        """Keep the states of the tokens from a position on; they replace older ones there."""
        start, states = self._states.get(row, (position, None))
        if states is None or position <= start:
            self._states[row] = (position, states_TE)
        else:
            self._states[row] = (start, torch.cat((states[: position - start], states_TE)))

    def pop(self, row: int) -> Tensor:
        return self._states.pop(row)[1]

    def clear(self) -> None:
        self._states.clear()


class LocalVerifier(Verifier):
    """Verifies drafts with a target in this process; the proposer, if any, encodes activations."""

    def __init__(self, target: Target, proposer: Proposer | None = None) -> None:
        self.target = target
        self._needs: frozenset[Need] = proposer.needs if proposer is not None else frozenset()
        self._encode = proposer.encode if proposer is not None and self._needs else None
        caching = proposer if isinstance(proposer, CachingProposer) else None
        self._encode_and_append = None if caching is None else caching.encode_and_append
        self._texts: dict[int, list[int]] = {}
        self.prompt_window = 0 if caching is None else caching.prompt_window
        self._encoded: dict[int, tuple[int, int]] = {}  # by row, first and end
        self._hidden = HiddenStates() if "final_states" in self._needs else None
        self._target_s = 0.0  # passes and head of the current call
        # By row, the scores of what the current call has read.
        self._scores: dict[int, tuple[list[float], list[Alternatives]]] = {}
        rules = PositionRules.of(target)
        self._rules = None if rules.are_plain else rules
        self._device = target.device  # `device` of a module searches its parameters
        is_cpu = self._device.type == "cpu"
        self.prompt_tokens = CPU_PROMPT_TOKENS if is_cpu else GPU_PROMPT_TOKENS
        self.cache = KVCache(target)
        self._text_pass = target.text_pass() if self._rules is None else None

    async def verify(self, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
        """One target pass for all requests (long prompts take several before it)."""
        with plain_torch(), torch.inference_mode(), self.target.limited_threads():
            return self._verify(requests)

    @property
    def cache_bytes(self) -> int:
        return self.cache.num_bytes

    def cut(self, row: int, length: int) -> None:
        self.cache.cut(row, length)

    def close(self, row: int) -> None:
        self.cache.give_back(row)
        self._texts.pop(row, None)
        self._encoded.pop(row, None)

    def set_back(self, row: int) -> None:
        """Drop the keys and states of a row; its text is read again by requests that say so."""
        self.cache.give_back(row)

    def release(self) -> None:
        """Free the cache's memory; no row may be in use."""
        self.cache.release()
        self._texts.clear()
        self._encoded.clear()
        if self._hidden is not None:
            self._hidden.clear()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._target_s += time.perf_counter() - started

    def _verify(self, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
        self._target_s = 0.0
        self._scores.clear()  # of a call that failed
        rows = self._prefill(requests)
        in_one_call = self._in_one_call(rows[0]) if len(rows) == 1 else None
        states, chosen = in_one_call or (self._states(rows), None)
        decisions = self._decide(rows, states, chosen)
        for row, states_TE, decision in zip(rows, states, decisions, strict=True):
            if row.request.scored:
                self._score(row, states_TE)
                logprobs, top = self._scores.pop(row.request.cache_row)
                decision.scores = TextLogprobs(tuple(logprobs), tuple(top))
        if self._hidden is not None:
            for row, states_TE, decision in zip(rows, states, decisions, strict=True):
                kept = [*range(row.num_new), *(row.num_new + node for node in decision.accepted)]
                self._hidden.add(row.request.cache_row, row.start, states_TE[kept])
        for request, decision in zip(requests, decisions, strict=True):
            root = request.num_verified + len(request.new_tokens) - 1
            slots = [root + 1 + node for node in decision.accepted]
            self.cache.commit(request.cache_row, root + 1, slots)
        started = time.perf_counter()
        accepted = [len(decision.accepted) for decision in decisions]
        features = self._features(requests, accepted)
        encode_s = time.perf_counter() - started
        pass_s = self._target_s if self._device.type == "cpu" else None
        for decision, feature in zip(decisions, features, strict=True):
            decision.features, decision.encode_s, decision.pass_s = feature, encode_s, pass_s
        return decisions

    def _prefill(self, requests: Sequence[VerifyRequest]) -> list[PassRow]:
        """Process all but the last chunk of long prompts; return a row for the rest of each."""
        rows: list[PassRow] = []
        for request in requests:
            start, tokens = request.num_verified, request.new_tokens
            while len(tokens) > PREFILL_CHUNK_TOKENS:
                chunk, tokens = tokens[:PREFILL_CHUNK_TOKENS], tokens[PREFILL_CHUNK_TOKENS:]
                row = PassRow(request, start, chunk, len(chunk))
                states, _ = self._in_one_call(row) or (self._states([row]), None)
                self._score(row, states[0])
                if self._hidden is not None:
                    self._hidden.add(request.cache_row, start, states[0])
                start += len(chunk)
            rows.append(PassRow(request, start, tokens + request.tree.tokens, len(tokens)))
        return rows

    def _in_one_call(self, row: PassRow) -> tuple[list[Tensor], list[int] | None] | None:
        """The pass over one row in one call: its states, and greedy choices.

        The states are those of the root and the drafts, of all tokens where the proposer reads
        them. There are no choices if logits are needed.

        Returns:
            None if the pass must be made in another way.
        """
        if self._text_pass is None:
            return None
        cache_row, visible = row.request.cache_row, row.start + len(row.tokens)
        drafts = row.request.tree.parents if row.drafted else ()
        parents = [*range(-1, row.num_new - 1), *(row.num_new + parent for parent in drafts)]
        ends = 1 + len(drafts)  # the root and the drafts, which the target chooses after
        choices = 0 if row.request.sampling.needs_logits else ends
        reads_all = self._hidden is not None or row.request.scored
        finished = len(row.tokens) if reads_all else ends
        with self._timed():
            self.cache.hold(cache_row, visible)
            slots = Slots(self.cache.data, [cache_row], [row.start], visible)
            result = self._text_pass.run(
                row.tokens, parents, slots, finished=finished, choices=choices
            )
        return None if result is None else ([result[0]], result[1])

    def _score(self, row: PassRow, states_TE: Tensor) -> None:
        """Add the log-probabilities of the tokens that follow each of a row's new ones."""
        first = row.start - row.request.num_verified
        following = row.request.scored[max(0, first) : max(0, first + row.num_new)]
        states_TE = states_TE[max(0, -first) :]  # without tokens that are read again
        logprobs, top = self._scores.setdefault(row.request.cache_row, ([], []))
        for start in range(0, len(following), MAX_HEAD_NODES):
            own = following[start : start + MAX_HEAD_NODES]
            with self._timed():
                log_p_TV = self.target.head(states_TE[start : start + len(own)]).log_softmax(-1)
            own_T1 = torch.tensor(own, device=self._device)[:, None]
            logprobs += log_p_TV.gather(1, own_T1)[:, 0].tolist()
            number = row.request.sampling.top_logprobs
            top += alternatives(log_p_TV, number) or [()] * len(own)

    def _states(self, rows: Sequence[PassRow]) -> list[Tensor]:
        """One pass over all rows: the final states of each one's tokens, (n, E)."""
        if len(rows) > 1:
            return ragged_states(rows, self._pass, recorded=self.target.layers.records)
        return [self._pass(rows)[0, : len(rows[0].tokens)]]

    def _pass(self, rows: Sequence[PassRow]) -> Tensor:
        """Run the target over the tokens of all rows, right-padded: (B, T, E) final states."""
        cache_rows, starts = [row.request.cache_row for row in rows], [row.start for row in rows]
        longest, kind = max(len(row.tokens) for row in rows), KVWriter
        visible = max(starts) + longest
        if self.target.layers.records:
            sizes = PassSizes.of(cache_rows, starts, longest, recorded=True)
            longest, visible, kind = sizes.tokens, sizes.visible, sizes.kind
        self.cache.reserve(max(cache_rows) + 1, visible)
        tree_BTT = np.array([_visible_matrix(row, longest) for row in rows])
        numbers_B2T = np.zeros((len(rows), 2, longest), np.int64)
        for numbers_2T, row in zip(numbers_B2T, rows, strict=True):
            numbers_2T[:, : len(row.tokens)] = row.tokens, row.positions
        tokens_BT, positions_BT = torch.from_numpy(numbers_B2T).to(self._device).unbind(1)
        mask_B1TS = tree_mask(starts, torch.from_numpy(tree_BTT).to(self._device), visible)
        with self._timed():
            return self.target.run(
                tokens_BT,
                positions_BT,
                mask_B1TS=mask_B1TS,
                write=self.cache.writer(cache_rows, starts, longest, visible, kind=kind),
                lengths_B=None if self._rules is None else self._rope_lengths(rows, self._rules),
            )

    def _rope_lengths(self, rows: Sequence[PassRow], rules: PositionRules) -> Tensor:
        """(B,) lengths of texts that determine the rotary embeddings of each row."""
        lengths = [rules.rope_length(row.request.prompt_length, row.text_length) for row in rows]
        return torch.tensor(lengths, device=self._device)

    def _decide(
        self, rows: Sequence[PassRow], states: Sequence[Tensor], chosen: list[int] | None
    ) -> list[VerifyResult]:
        """Accept the drafts of each tree that the target chooses itself."""
        if chosen:
            (request,) = (row.request for row in rows)
            return accept_greedy([request], [self._text(request)], chosen)
        decisions: list[VerifyResult] = []
        for group in head_groups(rows) if len(rows) > 1 else [rows]:
            own = states[len(decisions) : len(decisions) + len(group)]
            needed = [
                x_TE[row.num_new - 1 - len(row.tokens) :]
                for row, x_TE in zip(group, own, strict=True)
            ]
            requests = [row.request for row in group]
            states_NE, texts = _joined(needed, 0), [self._text(request) for request in requests]
            if any(request.sampling.needs_logits for request in requests):
                with self._timed():
                    logits_NV = self.target.head(states_NE)
                decisions += accept(requests, texts, logits_NV)
            else:
                with self._timed():
                    chosen_N = self.target.best(states_NE).tolist()
                decisions += accept_greedy(requests, texts, chosen_N)
        return decisions

    def _text(self, request: VerifyRequest) -> list[int]:
        """All tokens of a request up to the root: the verified ones, then `new_tokens`.

        Acceptance appends to it, so that the next round finds the accepted tokens.
        """
        text = self._texts.setdefault(request.cache_row, [])
        assert len(text) >= request.num_verified, "num_verified exceeds the text"
        text[request.num_verified :] = request.new_tokens
        return text

    def _features(
        self, requests: Sequence[VerifyRequest], num_accepted: Sequence[int]
    ) -> list[object]:
        """The encoding of all verified tokens that lack it; None where the proposer stored it."""
        features: list[object] = [None] * len(requests)
        ranges: dict[int, range] = {}
        for i, (request, accepted) in enumerate(zip(requests, num_accepted, strict=True)):
            if request.read_again:
                continue
            first, end = self._encoded.get(request.cache_row, (0, 0))
            self._encoded[request.cache_row] = (first, min(end, request.num_verified))
            if self._encode is not None and request.encode:
                first, ranges[i] = self.encoded_range(request, accepted)
                self._encoded[request.cache_row] = (first, ranges[i].stop)
        if len(ranges) == 1 and self._encode_and_append is not None:
            ((i, tokens),) = ranges.items()
            if self._encode_and_append(self.cache, requests[i].cache_row, tokens):
                return features
        if self._encode is not None and ranges:
            inputs = [
                self._activations(requests[i].cache_row, tokens) for i, tokens in ranges.items()
            ]
            positions = [position for tokens in ranges.values() for position in tokens]
            position_ids_1N = torch.tensor([positions], device=self._device)
            counts = [len(tokens) for tokens in ranges.values()]
            encoded = self._encode(_joined(inputs, 1), position_ids_1N, counts)
            for i, feature in zip(ranges, encoded, strict=True):
                features[i] = feature
        return features

    def encoded_range(self, request: VerifyRequest, accepted: int = 0) -> tuple[int, range]:
        first, start = self._encoded.get(request.cache_row, (0, 0))
        start = min(start, request.num_verified)
        stop = request.num_verified + len(request.new_tokens) + accepted
        window = request.window or self.prompt_window
        lowest = max(0, stop - window) if window else 0
        if lowest >= start or (lowest < first and 2 * (start - first) < window):
            first = start = lowest
        return first, range(start, stop)

    def _activations(self, row: int, tokens: range) -> Tensor:
        """The encoder's input: keys and values (1, n, L, K), or final states (1, n, E)."""
        if self._hidden is not None:
            return self._hidden.pop(row)[None]
        return self.cache.features(row, tokens.start, tokens.stop)


def _visible_matrix(row: PassRow, longest: int) -> np.ndarray:
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


def ragged_states(
    rows: Sequence[PassRow], run: Callable[[Sequence[PassRow]], Tensor], *, recorded: bool = False
) -> list[Tensor]:
    """One pass over all rows: the final states of each one's tokens, (n, E).

    Args:
        run: the pass, right-padded; returns (B, T, E).
        recorded: whether passes are recorded; then rows with drafts, whose number of parts would
            change from pass to pass, are not split.
    """
    whole = [row.drafted and (recorded or not row.request.tree.is_chain) for row in rows]
    width = _width(rows, [row for row, is_whole in zip(rows, whole, strict=True) if is_whole])
    split = [
        [row] if is_whole else _split(row, width) for row, is_whole in zip(rows, whole, strict=True)
    ]
    hidden_BTE = run([part for parts in split for part in parts])
    states: list[Tensor] = []
    first = 0
    for parts in split:
        own = [hidden_BTE[first + i, : len(part.tokens)] for i, part in enumerate(parts)]
        states.append(torch.cat(own) if len(own) > 1 else own[0])
        first += len(parts)
    return states


def _split(row: PassRow, width: int) -> list[PassRow]:
    """The row split into rows of `width` tokens; the last one may be shorter.

    Each part attends to the parts before it in the same pass, because a layer stores all keys
    before it computes attention. Only the last part may have pads: they overwrite the next slots.
    """
    cuts = range(0, len(row.tokens), width)
    if len(cuts) == 1:
        return [row]
    parts = [row.tokens[cut : cut + width] for cut in cuts]
    return [
        replace(row, start=row.start + cut, tokens=part, num_new=len(part))
        for cut, part in zip(cuts, parts, strict=True)
    ]


def _width(rows: Sequence[PassRow], whole: Sequence[PassRow]) -> int:
    """Tokens of each row of a pass: those of the longest, unless pads would cost too much."""
    sizes = [len(row.tokens) for row in rows]
    if len(sizes) * max(sizes) <= MAX_PAD_RATIO * sum(sizes):
        return max(sizes)
    reads = any(row.num_new > 1 for row in rows)
    return max([MIN_SPLIT_TOKENS if reads else 1, *(len(row.tokens) for row in whole)])


def head_groups(rows: Sequence[PassRow]) -> Iterator[list[PassRow]]:
    """Split rows into groups whose nodes fit into one call of the head."""
    group: list[PassRow] = []
    nodes = 0
    for row in rows:
        own = 1 + len(row.request.tree.tokens)
        if group and nodes + own > MAX_HEAD_NODES:
            yield group
            group, nodes = [], 0
        group.append(row)
        nodes += own
    yield group


def client_rows(device: torch.device) -> int:
    """Rows of one client that a step shared by several clients always takes.

    On a CPU each row makes the step longer for all clients. On a GPU the time to read the weights
    dominates, and a limit would only lower the throughput.
    """
    return CPU_CLIENT_ROWS if device.type == "cpu" else 1 << 30


def client_tokens(device: torch.device) -> int:
    """New tokens and drafts of one client that a pass shared by several clients always takes."""
    return CPU_CLIENT_TOKENS if device.type == "cpu" else 1 << 30
