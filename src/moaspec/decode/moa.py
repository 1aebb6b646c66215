"""Drafting with a Mixture-of-Attentions drafter.

Legend: B rows, T new tokens, W beams of a level, U drafted slots, S visible slots, E hidden size,
C CA's KV heads, V draft vocabulary.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moaspec.decode.cache import KVCache, prefix_mask, tree_mask
from moaspec.decode.coupling import Ranking
from moaspec.decode.protocols import Features, Need, RowText
from moaspec.decode.tree import DraftTree, Tree
from moaspec.errors import InputError, ShapeError
from moaspec.model import MoADrafter
from moaspec.model.layers import masked_attention
from moaspec.target import Target
from moaspec.target.packing import can_pack, pack_linears


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


class MoADrafting:
    """A `Drafter`: keeps SA's and CA's caches per row and grows trees level by level.

    Slot s of SA's cache holds the text's token s. Below the root, slot root + 1 + u holds drafted
    beam u; the next round writes over it. With N > 0 the drafted beams use the same slots of the
    target's own cache, in the last N layers, which the verification then writes over.

    Args:
        drafter: the trained module.
        target: the target it drafts for.
        num_target_layers: N; None takes what the checkpoint records first.

    Attributes:
        vocabulary: how many tokens can be drafted.
    """

    needs: frozenset[Need] = frozenset({"kv"})

    def __init__(
        self, drafter: MoADrafter, target: Target, *, num_target_layers: int | None = None
    ) -> None:
        config = drafter.config
        layers = config.num_target_layers[0] if num_target_layers is None else num_target_layers
        if not 0 <= layers <= target.num_layers:
            raise InputError(
                f"num_target_layers must be within 0..{target.num_layers}, got {layers}."
            )
        self.num_target_layers = layers
        self.target = target
        self.target_cache: KVCache | None = None
        self.module, self._head = prepared(drafter, target)
        ids = drafter.draft_token_ids
        self.vocabulary = target.vocab_size if ids is None else len(ids)
        self._vocabulary_ids = self._token_ids(torch.arange(self.vocabulary, device=target.device))
        sa, ca = config.self_attention, config.cross_attention
        self.text = self._cache(sa.num_kv_heads, sa.head_dim)
        self.memory = self._cache(ca.num_kv_heads, ca.head_dim)
        self.read: dict[int, int] = {}
        self.remembered: dict[int, int] = {}

    def borrow(self, target_cache: KVCache) -> None:
        """Let N > 0 attend to the target's own cache."""
        self.target_cache = target_cache

    def _cache(self, num_heads: int, head_dim: int) -> KVCache:
        return KVCache(
            num_layers=1,
            num_heads=num_heads,
            head_dim=head_dim,
            dtype=self.target.dtype,
            device=self.target.device,
        )

    @torch.inference_mode()
    def encode(
        self, kv_1NLK: Tensor, position_ids_1N: Tensor, counts: Sequence[int]
    ) -> list[Features]:
        """CA's keys and values of N verified tokens, split by row: pairs of (1, C, n, D)."""
        key, value = self.module.project_kv(self.module.aggregate(kv_1NLK), position_ids_1N)
        sizes = list(counts)
        return list(zip(key.split(sizes, dim=2), value.split(sizes, dim=2), strict=True))

    def observe(self, row: int, features: Features) -> None:
        """Append CA's keys and values of newly verified tokens."""
        key_1CTD, value_1CTD = features
        start = self.remembered.get(row, 0)
        stop = start + key_1CTD.shape[2]
        self.memory.reserve(row + 1, stop)
        self.memory.append(row, start, key_1CTD, value_1CTD)
        self.remembered[row] = stop

    def rollback(self, row: int, length: int) -> None:
        """Forget all but a row's first tokens; what lies beyond is written over."""
        for counts in (self.read, self.remembered):
            counts[row] = min(counts.get(row, 0), length)

    def close(self, row: int) -> None:
        """Forget a row."""
        self.read.pop(row, None)
        self.remembered.pop(row, None)

    def release(self) -> None:
        """Give the caches' memory back; no row may be in use."""
        self.text.release()
        self.memory.release()

    @torch.inference_mode()
    def propose(self, rows: Sequence[RowText], shape: Tree) -> list[DraftTree]:
        """Grow one tree per row, all rows level by level together."""
        vocabulary = self.vocabulary
        if shape.breadth > vocabulary:
            raise ShapeError(
                f"Tree breadth {shape.breadth} exceeds the draft vocabulary of {vocabulary}."
            )
        level = _Level(self, rows, shape)
        ranking = Ranking(rows, self._vocabulary_ids)
        children = ranking.children(level.read_root(), shape.breadth, 0)
        nodes, frontier = _first_level(*children)
        for depth in range(1, shape.depth):
            log_q_BWV = level.extend(self._token_ids(nodes.tokens), nodes.parents, frontier)
            children = ranking.children(log_q_BWV, shape.breadth, depth)
            nodes, frontier = _next_level(nodes, frontier, *children)
        return self._trees(nodes, shape.total_tokens)

    def _token_ids(self, draft_tokens: Tensor) -> Tensor:
        ids = self.module.draft_token_ids
        return draft_tokens if ids is None else ids.to(draft_tokens.device)[draft_tokens]

    def log_q(self, states_BWE: Tensor) -> Tensor:
        """Log-probabilities over the draft vocabulary, float32."""
        return self.target.logits(states_BWE, self._head).log_softmax(-1)

    def _trees(self, nodes: _Beams, total_tokens: int) -> list[DraftTree]:
        """The best nodes by cumulative score. Stable sorting keeps every parent of a kept node."""
        order = nodes.scores.sort(dim=1, descending=True, stable=True).indices
        kept_BN = order[:, :total_tokens].sort(dim=1).values
        tokens_BN = self._token_ids(nodes.tokens.gather(1, kept_BN))
        # A parent's place among the kept nodes; the root stays -1.
        old_BN = nodes.parents.gather(1, kept_BN)
        parents_BN = torch.searchsorted(kept_BN, old_BN).masked_fill(old_BN < 0, -1)
        rows = torch.stack((tokens_BN, parents_BN), dim=1).tolist()
        return [DraftTree(tuple(tokens), tuple(parents)) for tokens, parents in rows]


class _Level:
    """One round's passes through the speaker, for all rows together."""

    def __init__(self, drafting: MoADrafting, rows: Sequence[RowText], shape: Tree) -> None:
        self.drafting, self.rows = drafting, rows
        self.device = drafting.target.device
        self.indices = [row.row for row in rows]
        self.roots = [len(row.token_ids) - 1 for row in rows]
        self.levels = 0
        self.slots = max(self.roots) + 1 + (shape.depth - 1) * shape.breadth
        drafting.text.reserve(max(self.indices) + 1, self.slots)
        remembered = [drafting.remembered.get(row, 0) for row in self.indices]
        self.memory = drafting.memory.view(self.indices, max(remembered))
        self.memory_mask = prefix_mask(remembered, max(remembered), self.device)
        # own_BNU: which drafted slots (the root first) each drafted node sees, itself included.
        self.own_BNU = torch.ones(len(rows), 1, 1, dtype=torch.bool, device=self.device)

    def read_root(self) -> Tensor:
        """Read all text that SA has not read yet; log q after the root, (B, 1, V)."""
        drafting = self.drafting
        starts = [drafting.read.get(row, 0) for row in self.indices]
        fresh = [list(row.token_ids[start:]) for row, start in zip(self.rows, starts, strict=True)]
        longest = max(map(len, fresh))
        padded = [tokens + [0] * (longest - len(tokens)) for tokens in fresh]
        offsets_T = torch.arange(longest, device=self.device)
        starts_B1 = torch.tensor(starts, device=self.device)[:, None]
        causal_BTT = (offsets_T[:, None] >= offsets_T).expand(len(starts), -1, -1)
        visible = max(starts) + longest
        drafting.text.reserve(max(self.indices) + 1, visible)
        roots_B1 = torch.tensor(self.roots, device=self.device)[:, None]
        x_BTE = self._speak_text(
            torch.tensor(padded, device=self.device),
            # Pads must not look like a longer text: LongRoPE goes by a row's largest position.
            (starts_B1 + offsets_T).minimum(roots_B1),
            starts,
            tree_mask(starts, causal_BTT, visible),
        )
        last_B = torch.tensor([len(tokens) - 1 for tokens in fresh], device=self.device)
        root_B1E = x_BTE[torch.arange(len(fresh), device=self.device), last_B][:, None]
        for row in self.rows:
            drafting.read[row.row] = len(row.token_ids)
        return self._finish(root_B1E, roots_B1, self.roots, self.own_BNU)

    def extend(self, token_ids_BN: Tensor, parents_BN: Tensor, frontier_BW: Tensor) -> Tensor:
        """Feed the frontier's beams; log q of their children, (B, W, V)."""
        batch, width = frontier_BW.shape
        if self.levels == 0:
            parent_rows_BWU = self.own_BNU.expand(-1, width, -1)
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
        x_BWE = self._speak_text(token_ids_BN.gather(1, frontier_BW), position_BW, starts, mask)
        return self._finish(x_BWE, position_BW, starts, rows_BWU)

    def _remember_slots(self, frontier_BW: Tensor) -> None:
        first = self.own_BNU.shape[1] - frontier_BW.shape[1]
        self._frontier, self._first_slot = frontier_BW, first

    def _slot_of(self, parent_nodes_BW: Tensor) -> Tensor:
        """Drafted slot of nodes that were in the last frontier."""
        match_BWF = parent_nodes_BW[..., None] == self._frontier[:, None]
        return self._first_slot + match_BWF.long().argmax(-1)

    def _speak_text(
        self, token_ids_BT: Tensor, position_ids_BT: Tensor, starts: Sequence[int], mask: Tensor
    ) -> Tensor:
        drafting = self.drafting
        write = drafting.text.writer(self.indices, starts, token_ids_BT.shape[1], mask.shape[-1])

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return masked_attention(query, *write(0, key, value), mask)

        embeddings = drafting.target.embed(token_ids_BT)
        return drafting.module.speaker.read_text(embeddings, position_ids_BT, attend)

    def _finish(
        self, x_BWE: Tensor, position_BW: Tensor, starts: Sequence[int], own_BWU: Tensor
    ) -> Tensor:
        """CA, the reused layers, the head: log q, (B, W, V)."""
        drafting = self.drafting
        states_BWE = drafting.module.speaker.read_memory(
            x_BWE, position_BW, lambda q: masked_attention(q, *self.memory, self.memory_mask)
        )
        if drafting.num_target_layers:
            cache = drafting.target_cache
            assert cache is not None, "borrow() comes before drafting with N > 0"
            width, visible = states_BWE.shape[1], max(self.roots) + own_BWU.shape[2]
            cache.reserve(max(self.indices) + 1, self.slots)
            states_BWE = drafting.target.run_last(
                states_BWE,
                position_BW,
                num=drafting.num_target_layers,
                mask_B1TS=tree_mask(self.roots, own_BWU, visible),
                write=cache.writer(self.indices, starts, width, visible),
            )
        return drafting.log_q(states_BWE)


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


def prepared(drafter: MoADrafter, target: Target) -> tuple[MoADrafter, nn.Module]:
    """The drafter and its head as decoding runs them: packed copies where the CPU gains by them.

    They are made once and again when weights change, so a drafter in training may be tried out at
    any time. The drafter itself stays as it is.
    """
    ids = drafter.draft_token_ids
    chosen = None if ids is None else ids.data_ptr()
    key = (
        weakref.ref(target),
        target.packed,
        target.dtype,
        drafter.version,
        drafter.training,
        chosen,
    )
    return cast(
        tuple[MoADrafter, nn.Module],
        drafter.prepared.get(key, lambda: (_packed(drafter), target.draft_head(ids))),
    )


def _packed(drafter: MoADrafter) -> MoADrafter:
    weight = next(drafter.parameters())
    if drafter.training or not can_pack(weight.dtype, weight.device):
        return drafter
    copied = copy.deepcopy(drafter)
    pack_linears(copied)
    return copied
