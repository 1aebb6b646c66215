"""TreeProposer draft trees level by level, for drafters that are networks.

What all of them share: one cache slot per token of the text, drafted nodes in the slots behind it,
and the bookkeeping of which node sees which. What differs is how a token is read and what becomes
of it before the head.

Legend: B rows, T new tokens, W beams of a level, U drafted slots, S visible slots, E hidden size,
V draft vocabulary.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moaspec.backends.cpu.fused_drafting import Grown
from moaspec.drafting.draft_tree import DraftTree, Tree
from moaspec.drafting.kv_cache import KVCache, StoredAttention, tree_mask
from moaspec.drafting.path_scores import Ranking
from moaspec.drafting.protocols import Features, Need, RowText
from moaspec.target.target import Target

READ_CHUNK_TOKENS = 512
"""Longest stretch of unread text in one pass; bounds the memory of its mask and activations."""


@dataclass
class _Beams:
    """The drafted nodes so far, all levels, for B rows.

    Attributes:
        tokens, scores, parents: (B, nodes) draft token, score of its path (see `Ranking`), parent
            node or -1.
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor


@dataclass(frozen=True)
class TokenBatch:
    """Tokens of one pass, of all rows.

    Attributes:
        token_ids_BT: the tokens.
        position_ids_BT: theirs.
        starts: first slot that each row writes.
        mask: (B, 1, T, S), which slots each token sees.
        parent_slots_BT: drafts only: the drafted slot (0: the root) of each one's parent.
    """

    token_ids_BT: Tensor
    position_ids_BT: Tensor
    starts: Sequence[int]
    mask: Tensor
    parent_slots_BT: Tensor | None = None


class TreeProposer(ABC):
    """A `Drafter` that grows trees with a network.

    Slot s of the text cache holds token s + `token_offset` of the text. Below the root, slot
    root + 1 + u holds drafted beam u; the next round writes over it.

    Args:
        target: the target it drafts for.
        draft_token_ids: the trimmed vocabulary, None for the full one.
        text: keys and values of the text, of as many layers as read it.
        head: of the target, for the tokens that can be drafted (see `Target.draft_head`).

    Attributes:
        vocabulary: how many tokens can be drafted.
        vocabulary_ids: their ids.
        draft_head: the argument `head`.
        device: of target and caches.
    """

    needs: frozenset[Need] = frozenset()
    token_offset = 0
    """How many tokens ahead of its slot a token is: 1 where it is read with its predecessor's
    state."""

    def __init__(
        self, target: Target, draft_token_ids: Tensor | None, text: KVCache, head: nn.Module
    ) -> None:
        self.target, self.text = target, text
        self.device = target.device  # asking a model takes a walk through its parameters
        self.draft_head, self._draft_token_ids = head, draft_token_ids
        self.vocabulary = target.vocab_size if draft_token_ids is None else len(draft_token_ids)
        self.vocabulary_ids = self._token_ids(torch.arange(self.vocabulary, device=self.device))
        self.num_read: dict[int, int] = {}

    @abstractmethod
    def level(self, rows: Sequence[RowText], shape: Tree) -> DraftRound:
        """What reads the tokens of one round."""

    def log_q(self, states_BWE: Tensor) -> Tensor:
        """Log-probabilities over the draft vocabulary, float32."""
        return self.target.logits(states_BWE, self.draft_head).log_softmax(-1)

    def encode(
        self, _activations_1N: Tensor, _position_ids_1N: Tensor, counts: Sequence[int]
    ) -> list[Features]:
        """No features, unless a subclass needs them."""
        return [None] * len(counts)

    def observe(self, row: int, features: Features) -> None:  # noqa: B027 - nothing to take in
        """Nothing to take in, unless a subclass does."""

    def rollback(self, row: int, length: int) -> None:
        """Forget all but a row's first tokens; what lies beyond is written over."""
        self.num_read[row] = max(0, min(self.num_read.get(row, 0), length - self.token_offset))

    def close(self, row: int) -> None:
        """Forget a row."""
        self.num_read.pop(row, None)

    def release(self) -> None:
        """Give the cache's memory back; no row may be in use."""
        self.text.release()

    @torch.inference_mode()
    def propose(self, rows: Sequence[RowText], shape: Tree) -> list[DraftTree]:
        """Grow one tree per row, all rows level by level together.

        A breadth beyond the draft vocabulary means all of it.
        """
        shape = shape.narrowed(self.vocabulary)
        with self.target.threads.limited():
            level = self.level(rows, shape)
            grown = level.grow(shape) or self._grow(level, shape)
        return [best_nodes(one, shape) for one in grown]

    def _grow(self, level: DraftRound, shape: Tree) -> list[Grown]:
        """All nodes that are drafted for each row, level by level."""
        ranking = Ranking(level.rows, self.vocabulary_ids)
        children = ranking.children(self.log_q(level.read_root()), shape.breadth, 0)
        nodes, frontier = _first_level(*children)
        levels, num_read = 1, 0
        while levels < shape.depth:
            frontier = _drafted_on(nodes, frontier, shape)
            if not frontier.shape[1]:
                break
            frontier_width = frontier.shape[1]
            log_q_BWV = level.extend(self._token_ids(nodes.tokens), nodes.parents, frontier)
            children = ranking.children(log_q_BWV, shape.breadth, levels)
            nodes, frontier = _next_level(nodes, frontier, *children)
            levels += 1
            num_read += frontier_width
        # One copy from the device; float64 holds ids and parents exactly.
        ids_BN = self._token_ids(nodes.tokens)
        facts_B3N = torch.stack((ids_BN.double(), nodes.parents.double(), nodes.scores.double()), 1)
        return [
            Grown([*map(int, ids)], [*map(int, parents)], scores, levels, num_read)
            for ids, parents, scores in facts_B3N.tolist()
        ]

    def _token_ids(self, draft_tokens: Tensor) -> Tensor:
        ids = self._draft_token_ids
        return draft_tokens if ids is None else ids.to(draft_tokens.device)[draft_tokens]


def best_nodes(grown: Grown, shape: Tree) -> DraftTree:
    """The best nodes by cumulative score: as many as the shape has, or as pay for themselves.

    Stable sorting keeps every parent of a kept node.
    """
    tokens, parents, scores = grown.tokens, grown.parents, grown.scores
    order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
    count = shape.kept([scores[node] for node in order])
    if count < len(order):
        kept = sorted(order[:count])
        places = {-1: -1} | {node: place for place, node in enumerate(kept)}
        tokens = [tokens[node] for node in kept]
        parents = [places[parents[node]] for node in kept]
    return DraftTree(tuple(tokens), tuple(parents), levels=grown.levels, num_read=grown.num_read)


@dataclass(frozen=True)
class DraftSlots:
    """Where drafted nodes are: first slot of each row's pass, and which drafted slots they see."""

    starts: Sequence[int]
    sees_BWU: Tensor


class DraftRound(ABC):
    """One round's passes through the network, for all rows together."""

    def __init__(self, drafting: TreeProposer, rows: Sequence[RowText], shape: Tree) -> None:
        self.drafting, self.rows = drafting, rows
        self.device = drafting.device
        self.indices = [row.row for row in rows]
        self.roots = [len(row.token_ids) - 1 - drafting.token_offset for row in rows]
        self.levels = 0
        self.slots = max(self.roots) + 1 + (shape.depth - 1) * shape.breadth
        drafting.text.reserve(max(self.indices) + 1, self.slots)

    @cached_property
    def own_BNU(self) -> Tensor:  # noqa: N802 - axes
        """Which drafted slots, the root first, each drafted node sees, itself included; grows."""
        return torch.ones(len(self.rows), 1, 1, dtype=torch.bool, device=self.device)

    @abstractmethod
    def run_self_attention(self, reading: TokenBatch) -> Tensor:
        """Read tokens, storing their keys and values: (B, T, E)."""

    def fill_reused_layers(self, x_BTE: Tensor, starts: Sequence[int]) -> None:  # noqa: B027 - most need not
        """Told of text that was read, from slot `starts` of each row on, at most to its root."""

    def finish(self, x_BWE: Tensor, _position_BW: Tensor, _own: DraftSlots) -> Tensor:
        """From what was read of nodes to states for the head, (B, W, E)."""
        return x_BWE

    def read_root(self) -> Tensor:
        """Read all text that was not read yet; the root's final state, (B, 1, E).

        A root is read again where the same text is drafted for twice.
        """
        drafting = self.drafting
        starts = [
            min(drafting.num_read.get(row, 0), root)
            for row, root in zip(self.indices, self.roots, strict=True)
        ]
        fresh = [
            list(row.token_ids[start + drafting.token_offset :])
            for row, start in zip(self.rows, starts, strict=True)
        ]
        lasts = [len(tokens) - 1 for tokens in fresh]
        roots: list[Tensor] = [torch.empty(0)] * len(fresh)
        for first in range(0, max(lasts) + 1, READ_CHUNK_TOKENS):
            reading = self._stretch(fresh, starts, first)
            x_BTE = self.run_self_attention(reading)
            self.fill_reused_layers(x_BTE[:, :READ_CHUNK_TOKENS], reading.starts)
            for i, last in enumerate(lasts):
                if first <= last < first + READ_CHUNK_TOKENS:
                    roots[i] = x_BTE[i : i + 1, last - first : last - first + 1]
        for row in self.rows:
            drafting.num_read[row.row] = len(row.token_ids) - drafting.token_offset
        root_B1E = torch.cat(roots) if len(roots) > 1 else roots[0]
        roots_B1 = torch.tensor(self.roots, device=self.device)[:, None]
        return self._finished(root_B1E, roots_B1, DraftSlots(self.roots, self.own_BNU))

    def grow(self, _shape: Tree) -> list[Grown] | None:
        """The nodes that are drafted for each row, where one call gives all of a row's.

        It reads the text that was not read yet, as `read_root` does.
        """
        return None

    def _stretch(self, fresh: Sequence[list[int]], starts: Sequence[int], first: int) -> TokenBatch:
        """The tokens of one pass: those from `first` on of every row's fresh ones.

        LongRoPE goes by a row's largest position in a pass. So pads stay within the text, and where
        more text follows, the stretch ends with a pad at the root, which is written over next.
        """
        longest = max(map(len, fresh)) - first
        count = min(longest, READ_CHUNK_TOKENS)
        width = count + (longest > count)
        starts = [start + first for start in starts]
        tokens = [tokens[first : first + count] for tokens in fresh]
        positions = [
            [min(start + i, root) for i in range(count)] + [root] * (width - count)
            for start, root in zip(starts, self.roots, strict=True)
        ]
        causal_TT = torch.ones(width, width, dtype=torch.bool, device=self.device).tril()
        visible = max(starts) + width
        self.drafting.text.reserve(max(self.indices) + 1, visible)
        return TokenBatch(
            torch.tensor([row + [0] * (width - len(row)) for row in tokens], device=self.device),
            torch.tensor(positions, device=self.device),
            starts,
            tree_mask(starts, causal_TT.expand(len(starts), -1, -1), visible),
        )

    def extend(self, token_ids_BN: Tensor, parents_BN: Tensor, frontier_BW: Tensor) -> Tensor:
        """Feed the frontier's beams; log q of their children, (B, W, V)."""
        batch, width = frontier_BW.shape
        if self.levels == 0:
            parent_slot_BW = torch.zeros_like(frontier_BW)
        else:
            parent_slot_BW = self._slot_of(parents_BN.gather(1, frontier_BW))
        index = parent_slot_BW[..., None].expand(-1, -1, self.own_BNU.shape[2])
        parent_rows_BWU = self.own_BNU.gather(1, index)
        itself = torch.eye(width, dtype=torch.bool, device=self.device).expand(batch, -1, -1)
        rows_BWU = torch.cat((parent_rows_BWU, itself), dim=2)
        padded = F.pad(self.own_BNU, (0, width))
        self.own_BNU = torch.cat((padded, rows_BWU), dim=1)
        self._remember_slots(frontier_BW)
        self.levels += 1
        used = rows_BWU.shape[2]
        starts = [root + used - width for root in self.roots]
        position_BW = torch.tensor(self.roots, device=self.device)[:, None] + self.levels
        position_BW = position_BW.expand(-1, width)
        mask = tree_mask(self.roots, rows_BWU, max(self.roots) + used)
        tokens_BW = token_ids_BN.gather(1, frontier_BW)
        x_BWE = self.run_self_attention(
            TokenBatch(tokens_BW, position_BW, starts, mask, parent_slot_BW)
        )
        return self.drafting.log_q(self._finished(x_BWE, position_BW, DraftSlots(starts, rows_BWU)))

    def _finished(self, x_BWE: Tensor, position_BW: Tensor, own: DraftSlots) -> Tensor:
        states_BWE = self.finish(x_BWE, position_BW, own)
        self.finished(states_BWE)
        return states_BWE

    def finished(self, states_BWE: Tensor) -> None:  # noqa: B027 - most need not know
        """Told of every node's final state, the root's first, in the order of drafted slots."""

    def _attentions(self, reading: TokenBatch) -> list[StoredAttention]:
        """Storing in the text cache and reading from it, for each of its layers in one pass."""
        width = reading.token_ids_BT.shape[1]
        return self.drafting.text.attentions(self.indices, reading.starts, width, reading.mask)

    def _remember_slots(self, frontier_BW: Tensor) -> None:
        first = self.own_BNU.shape[1] - frontier_BW.shape[1]
        self._frontier, self._first_slot = frontier_BW, first

    def _slot_of(self, parent_nodes_BW: Tensor) -> Tensor:
        """Drafted slot of nodes that were in the last frontier."""
        match_BWF = parent_nodes_BW[..., None] == self._frontier[:, None]
        return self._first_slot + match_BWF.long().argmax(-1)


def _drafted_on(nodes: _Beams, frontier_BW: Tensor, shape: Tree) -> Tensor:
    """The part of the frontier that is drafted on, as wide as any row needs; best beams first."""
    if shape.least_log_p == -math.inf:
        return frontier_BW
    likely_BW = nodes.scores.gather(1, frontier_BW) >= shape.least_log_p
    return frontier_BW[:, : int(likely_BW.sum(1).max())]


def _first_level(scores_B1C: Tensor, tokens_B1C: Tensor) -> tuple[_Beams, Tensor]:
    scores, tokens = scores_B1C[:, 0], tokens_B1C[:, 0]
    nodes = _Beams(tokens, scores, torch.full_like(tokens, -1))
    return nodes, torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)


def _next_level(
    nodes: _Beams, frontier_BW: Tensor, child_scores: Tensor, child_tokens: Tensor
) -> tuple[_Beams, Tensor]:
    """Add each beam's children, (B, W, C); the best C of them all are the next frontier."""
    breadth = child_tokens.shape[-1]
    scores_BC = (nodes.scores.gather(1, frontier_BW)[..., None] + child_scores).flatten(1)
    parents_BC = frontier_BW[..., None].expand_as(child_tokens).flatten(1)
    best_BW = scores_BC.topk(breadth, dim=-1).indices
    grown = _Beams(
        torch.cat((nodes.tokens, child_tokens.flatten(1)), dim=1),
        torch.cat((nodes.scores, scores_BC), dim=1),
        torch.cat((nodes.parents, parents_BC), dim=1),
    )
    return grown, nodes.tokens.shape[1] + best_BW
