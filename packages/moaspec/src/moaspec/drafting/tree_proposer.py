"""Draft trees level by level, for drafters that are networks, in plain PyTorch.

`TreeProposer` grows the tree and keeps caches. `DraftRound` runs the network on the nodes of one
round. Subclasses of both add what differs between drafters: how a token is processed, and what
happens to its state before the head.

Legend: B requests, T new tokens, W nodes of a level, N nodes of all levels, U draft slots (the root
first), C children of a node, E hidden size, V draft vocabulary.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moaspec.drafting.kv_cache import KVCache, StoredAttention, tree_mask
from moaspec.drafting.path_scores import Ranking
from moaspec.target.target import Target
from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.drafting.protocols import CachingProposer, RequestText

READ_CHUNK_TOKENS = 512
"""Most tokens of a text in one pass of the drafter; bounds the memory of mask and activations."""


class CandidateNodes(NamedTuple):
    """All nodes that were drafted for one request, parents first."""

    tokens: Sequence[int]  # ids in the target's vocabulary
    parents: Sequence[int]  # node, -1: the root
    scores: Sequence[float]  # score of the path to each node, see `Ranking`
    levels: int
    num_expanded: int  # how many nodes got children


class TreeProposer(CachingProposer):
    """A `Proposer` that grows trees with a network.

    Slot s of the text cache holds token s + `token_offset` of the text. Behind the root's slot,
    slot root + 1 + u holds draft u; the next round overwrites it.

    Args:
        draft_token_ids: the trimmed vocabulary, None for the full one.
        text_cache: keys and values of the text and its drafts, of each layer of the drafter that
            processes tokens.
        head: of the target, for the tokens that can be drafted (see `Target.draft_head`).

    Attributes:
        vocabulary: how many tokens can be drafted.
        num_read: by cache row, tokens of the text that the text cache holds.
    """

    token_offset = 0
    """1 for drafters that process a token with the state of the token before it (EAGLE)."""

    def __init__(
        self, target: Target, draft_token_ids: Tensor | None, text_cache: KVCache, head: nn.Module
    ) -> None:
        self.target, self.text_cache = target, text_cache
        self.device = target.device  # `device` of a module searches its parameters
        self.draft_head, self._draft_token_ids = head, draft_token_ids
        if draft_token_ids is None:
            self.vocabulary_ids = torch.arange(target.vocab_size, device=self.device)
        else:
            self.vocabulary_ids = draft_token_ids.to(self.device)
        self.vocabulary = len(self.vocabulary_ids)
        self.num_read: dict[int, int] = {}

    @property
    def caches(self) -> list[KVCache]:
        return [self.text_cache]

    @abstractmethod
    def draft_round(self, rows: Sequence[RequestText], shape: Tree) -> "DraftRound":
        """The passes of one round."""

    def propose(self, rows: Sequence[RequestText], shape: Tree) -> list[DraftTree]:
        """Draft one tree per request, all requests level by level together.

        A breadth beyond the draft vocabulary means all of it.
        """
        shape = shape.narrowed(self.vocabulary)
        with self.target.limited_threads():
            return [best_nodes(nodes, shape) for nodes in self.grow(rows, shape)]

    @torch.inference_mode()
    def grow(self, rows: Sequence[RequestText], shape: Tree) -> list[CandidateNodes]:
        """All nodes that are drafted for each request.

        The most probable children of the root are the first level. Of each level's nodes the best
        `breadth` get children, which are the next level.
        """
        draft_round = self.draft_round(rows, shape)
        sampled = any(row.sampling.samples for row in rows)
        ranking = Ranking(rows, self.vocabulary_ids) if sampled else None
        children = _children(self.log_q(draft_round.read_root()), shape.breadth, ranking, 0)
        nodes, frontier_BW = _first_level(*children)
        levels, num_expanded = 1, 0
        while levels < shape.depth:
            frontier_BW = _likely_nodes(nodes, frontier_BW, shape)
            if not frontier_BW.shape[1]:
                break
            num_expanded += frontier_BW.shape[1]
            token_ids_BN = self._token_ids(nodes.tokens)
            states_BWE = draft_round.read_nodes(token_ids_BN, nodes.parents, frontier_BW)
            children = _children(self.log_q(states_BWE), shape.breadth, ranking, levels)
            nodes, frontier_BW = _next_level(nodes, frontier_BW, *children)
            levels += 1
        # One copy from the device; float64 holds ids and parents exactly.
        ids_BN = self._token_ids(nodes.tokens)
        columns = (ids_BN, nodes.parents, nodes.scores)
        columns_B3N = torch.stack([column_BN.double() for column_BN in columns], 1)
        return [
            CandidateNodes([*map(int, ids)], [*map(int, parents)], scores, levels, num_expanded)
            for ids, parents, scores in columns_B3N.tolist()
        ]

    def log_q(self, states_BWE: Tensor) -> Tensor:
        """Log-probabilities over the draft vocabulary, float32."""
        return self.target.logits(states_BWE, self.draft_head).log_softmax(-1)

    def _token_ids(self, draft_tokens: Tensor) -> Tensor:
        ids = self._draft_token_ids
        return draft_tokens if ids is None else ids.to(draft_tokens.device)[draft_tokens]

    def rollback(self, row: int, length: int) -> None:
        """Keep the first `length` tokens of a row; later slots are overwritten."""
        self.num_read[row] = max(0, min(self.num_read.get(row, 0), length - self.token_offset))
        self.text_cache.cut(row, length)

    def close(self, row: int) -> None:
        self.num_read.pop(row, None)
        self.text_cache.give_back(row)

    def release(self) -> None:
        self.text_cache.release()


def _children(
    log_q_BWV: Tensor, breadth: int, ranking: Ranking | None, depth: int
) -> tuple[Tensor, Tensor]:
    """Scores and draft tokens of the best children of each node, (B, W, C) each."""
    if ranking is not None:
        return ranking.children(log_q_BWV, breadth, depth)
    scores_BWC, tokens_BWC = log_q_BWV.topk(breadth, dim=-1)
    return scores_BWC, tokens_BWC


def best_nodes(nodes: CandidateNodes, shape: Tree) -> DraftTree:
    """The tree of the nodes with the best scores; `shape` says how many.

    Stable sorting keeps every parent of a kept node.
    """
    tokens, parents, scores, levels, num_expanded = nodes
    count = shape.kept(sorted(scores, reverse=True))
    if count < len(scores):
        kept = sorted(sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[:count])
        places = {-1: -1} | {node: place for place, node in enumerate(kept)}
        tokens = [tokens[node] for node in kept]
        parents = [places[parents[node]] for node in kept]
        scores = [scores[node] for node in kept]
    return DraftTree(tuple(tokens), tuple(parents), 0, levels, num_expanded, tuple(scores))


@dataclass(frozen=True)
class TokenBatch:
    """Tokens of one pass, of all requests."""

    token_ids_BT: Tensor
    position_ids_BT: Tensor
    starts: Sequence[int]  # first slot that each row writes
    mask: Tensor  # (B, 1, T, S), which slots each token sees
    # Of drafts only, the draft slot of each one's parent (0: the root).
    parent_slots_BT: Tensor | None = None


@dataclass(frozen=True)
class DraftSlots:
    """Slots of the nodes of one pass: the first of each row, and which draft slots they see."""

    starts: Sequence[int]
    sees_BWU: Tensor


class DraftRound(ABC):
    """The passes of one round through the network, for all requests together.

    Attributes:
        roots: slot of each request's last token.
        num_slots: slots that the round may need.
        sees_BNU: which draft slots each node sees, itself included; the root is the first. It grows
            with each level.
    """

    def __init__(self, proposer: TreeProposer, rows: Sequence[RequestText], shape: Tree) -> None:
        self.proposer, self.rows = proposer, rows
        self.device = proposer.device
        self.cache_rows = [row.cache_row for row in rows]
        self.roots = [len(row.token_ids) - 1 - proposer.token_offset for row in rows]
        self.num_slots = max(self.roots) + 1 + (shape.depth - 1) * shape.breadth
        self.sees_BNU = torch.ones(len(rows), 1, 1, dtype=torch.bool, device=self.device)
        self._levels = 0
        self._frontier_BW, self._frontier_slot = torch.empty(0), 0
        proposer.text_cache.reserve(max(self.cache_rows) + 1, self.num_slots)

    @abstractmethod
    def run_self_attention(self, batch: TokenBatch) -> Tensor:
        """Process tokens and store their keys and values: (B, T, E)."""

    def fill_reused_layers(self, x_BTE: Tensor, starts: Sequence[int]) -> None:  # noqa: B027 - optional
        """Hook for text that was processed, from slot `starts` of each row up to its root."""

    def finish(self, x_BWE: Tensor, _position_BW: Tensor, _slots: DraftSlots) -> Tensor:
        """Turn the states of nodes into states for the head, (B, W, E)."""
        return x_BWE

    def read_root(self) -> Tensor:
        """Process all text that the cache does not hold yet; the root's final state, (B, 1, E).

        A root is processed again when the same text is drafted for twice.
        """
        proposer = self.proposer
        starts = [
            min(proposer.num_read.get(row, 0), root)
            for row, root in zip(self.cache_rows, self.roots, strict=True)
        ]
        unread = [
            list(row.token_ids[start + proposer.token_offset :])
            for row, start in zip(self.rows, starts, strict=True)
        ]
        lasts = [len(tokens) - 1 for tokens in unread]
        roots: list[Tensor] = [torch.empty(0)] * len(unread)
        for first in range(0, max(lasts) + 1, READ_CHUNK_TOKENS):
            batch = self._chunk(unread, starts, first)
            x_BTE = self.run_self_attention(batch)
            self.fill_reused_layers(x_BTE[:, :READ_CHUNK_TOKENS], batch.starts)
            for i, last in enumerate(lasts):
                if first <= last < first + READ_CHUNK_TOKENS:
                    roots[i] = x_BTE[i : i + 1, last - first : last - first + 1]
        for row in self.rows:
            proposer.num_read[row.cache_row] = len(row.token_ids) - proposer.token_offset
        root_B1E = torch.cat(roots) if len(roots) > 1 else roots[0]
        roots_B1 = torch.tensor(self.roots, device=self.device)[:, None]
        return self.finish(root_B1E, roots_B1, DraftSlots(self.roots, self.sees_BNU))

    def _chunk(self, unread: Sequence[list[int]], starts: Sequence[int], first: int) -> TokenBatch:
        """The tokens of one pass: those from `first` on of every request's unread ones.

        LongRoPE depends on a row's largest position in a pass. So pads stay within the text, and
        where more text follows, the chunk ends with a pad at the root, which is overwritten next.
        """
        longest = max(map(len, unread)) - first
        count = min(longest, READ_CHUNK_TOKENS)
        width = count + (longest > count)
        starts = [start + first for start in starts]
        tokens = [tokens[first : first + count] for tokens in unread]
        positions = [
            [min(start + i, root) for i in range(count)] + [root] * (width - count)
            for start, root in zip(starts, self.roots, strict=True)
        ]
        causal_TT = torch.ones(width, width, dtype=torch.bool, device=self.device).tril()
        visible = max(starts) + width
        self.proposer.text_cache.reserve(max(self.cache_rows) + 1, visible)
        return TokenBatch(
            torch.tensor([row + [0] * (width - len(row)) for row in tokens], device=self.device),
            torch.tensor(positions, device=self.device),
            starts,
            tree_mask(starts, causal_TT.expand(len(starts), -1, -1), visible),
        )

    def read_nodes(self, token_ids_BN: Tensor, parents_BN: Tensor, frontier_BW: Tensor) -> Tensor:
        """Process the nodes of the frontier; their final states, (B, W, E)."""
        batch, width = frontier_BW.shape
        if self._levels == 0:
            parent_slots_BW = torch.zeros_like(frontier_BW)
        else:
            parent_slots_BW = self._slots_of(parents_BN.gather(1, frontier_BW))
        index = parent_slots_BW[..., None].expand(-1, -1, self.sees_BNU.shape[2])
        itself = torch.eye(width, dtype=torch.bool, device=self.device).expand(batch, -1, -1)
        sees_BWU = torch.cat((self.sees_BNU.gather(1, index), itself), dim=2)
        self.sees_BNU = torch.cat((F.pad(self.sees_BNU, (0, width)), sees_BWU), dim=1)
        num_draft_slots = sees_BWU.shape[2]
        self._frontier_BW, self._frontier_slot = frontier_BW, num_draft_slots - width
        self._levels += 1
        starts = [root + num_draft_slots - width for root in self.roots]
        position_BW = torch.tensor(self.roots, device=self.device)[:, None] + self._levels
        position_BW = position_BW.expand(-1, width)
        mask = tree_mask(self.roots, sees_BWU, max(self.roots) + num_draft_slots)
        tokens_BW = token_ids_BN.gather(1, frontier_BW)
        nodes = TokenBatch(tokens_BW, position_BW, starts, mask, parent_slots_BW)
        x_BWE = self.run_self_attention(nodes)
        return self.finish(x_BWE, position_BW, DraftSlots(starts, sees_BWU))

    def _slots_of(self, nodes_BW: Tensor) -> Tensor:
        """Draft slots of nodes that were in the last frontier."""
        match_BWF = nodes_BW[..., None] == self._frontier_BW[:, None]
        return self._frontier_slot + match_BWF.long().argmax(-1)

    def _attentions(self, batch: TokenBatch) -> list[StoredAttention]:
        """Attention over the text cache for each of its layers in one pass."""
        width = batch.token_ids_BT.shape[1]
        return self.proposer.text_cache.attentions(self.cache_rows, batch.starts, width, batch.mask)


@dataclass
class _Nodes:
    """The nodes so far, all levels, (B, N) each: draft token, path score, parent node or -1."""

    tokens: Tensor
    scores: Tensor
    parents: Tensor


def _first_level(scores_B1C: Tensor, tokens_B1C: Tensor) -> tuple[_Nodes, Tensor]:
    """The root's children, and the frontier: all of them."""
    scores, tokens = scores_B1C[:, 0], tokens_B1C[:, 0]
    nodes = _Nodes(tokens, scores, torch.full_like(tokens, -1))
    return nodes, torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)


def _likely_nodes(nodes: _Nodes, frontier_BW: Tensor, shape: Tree) -> Tensor:
    """The frontier without nodes that are too unlikely, as wide as any request needs."""
    if shape.least_log_p == -math.inf:
        return frontier_BW
    likely_BW = nodes.scores.gather(1, frontier_BW) >= shape.least_log_p
    return frontier_BW[:, : int(likely_BW.sum(1).max())]


def _next_level(
    nodes: _Nodes, frontier_BW: Tensor, scores_BWC: Tensor, tokens_BWC: Tensor
) -> tuple[_Nodes, Tensor]:
    """Add each frontier node's children; the best C of them all are the next frontier."""
    breadth = tokens_BWC.shape[-1]
    scores = (nodes.scores.gather(1, frontier_BW)[..., None] + scores_BWC).flatten(1)
    parents = frontier_BW[..., None].expand_as(tokens_BWC).flatten(1)
    best_BC = scores.topk(breadth, dim=-1).indices
    grown = _Nodes(
        torch.cat((nodes.tokens, tokens_BWC.flatten(1)), dim=1),
        torch.cat((nodes.scores, scores), dim=1),
        torch.cat((nodes.parents, parents), dim=1),
    )
    return grown, nodes.tokens.shape[1] + best_BC
