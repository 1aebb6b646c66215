"""Drafting with a Mixture-of-Attentions drafter, in plain PyTorch.

Legend: B requests, T new tokens, N verified tokens of all requests, L target layers, K one layer's
key and value, W nodes of a level, S visible slots, E hidden size, C CA's KV heads.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from moaspec.drafting.kv_cache import KVCache, StoredMemory, prefix_mask, tree_mask
from moaspec.drafting.proposer_checks import check_num_target_layers, check_place
from moaspec.drafting.tree_proposer import DraftRound, DraftSlots, TokenBatch, TreeProposer
from moaspec.model.checkpoint.moa_config import check_target
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_core.drafting.draft_tree import Tree
from moaspec_core.drafting.protocols import Features, Need, RequestText


class MoAProposer(TreeProposer):
    """Drafts with SA over text and drafts, and CA over the encoder's output for verified tokens.

    With N > 0 the last N layers of the target process the drafts, too. Their keys and values go
    into the target's own cache behind the root, where the verification overwrites them.

    Args:
        num_target_layers: N; None takes the first of the checkpoint's list.

    Attributes:
        memory: CA's keys and values.
        num_encoded: by cache row, number of tokens up to the last in `memory`.
        first_encoded: by cache row, position of the first token in `memory`, if it is not 0.
        missing: by cache row, positions between the two that `memory` lacks, as on devices.

    Raises:
        InputError: an N that the target or the drafter cannot have, or a drafter of another dtype
            or on another device than the target.
        MismatchError: the drafter records another target.
    """

    needs: frozenset[Need] = frozenset({"kv"})

    def __init__(
        self, drafter: MoADrafter, target: Target, *, num_target_layers: int | None = None
    ) -> None:
        config = drafter.config
        check_target(config, None, target.identity, where="drafter")
        check_place(drafter, target)
        layers = config.num_target_layers[0] if num_target_layers is None else num_target_layers
        check_num_target_layers(layers, drafter, target)
        self.module, head = self.modules(drafter, target)
        text = KVCache(target, config.self_attention, config.self_attention_layers)
        super().__init__(target, drafter.draft_token_ids, text, head)
        self.num_target_layers = layers
        self.target_cache: KVCache | None = None
        self.memory = KVCache(target, config.cross_attention)
        self.prompt_window = config.prompt_window
        self.num_encoded: dict[int, int] = {}
        self.first_encoded: dict[int, int] = {}
        self.missing: dict[int, set[int]] = {}

    def modules(self, drafter: MoADrafter, target: Target) -> tuple[MoADrafter, nn.Module]:
        return drafter, target.draft_head(drafter.draft_token_ids)

    def use_exit(self, num_target_layers: int) -> None:
        """Draft with this N from now on; no row may be in use."""
        check_num_target_layers(num_target_layers, self.module, self.target)
        self.num_target_layers = num_target_layers

    @property
    def caches(self) -> list[KVCache]:
        return [self.text_cache, self.memory]

    def share_target_cache(self, target_cache: KVCache) -> None:
        """Set the cache for N > 0: the target's own, or a copy of what a server sends."""
        self.target_cache = target_cache

    @torch.inference_mode()
    def encode(
        self, kv_1NLK: Tensor, position_ids_1N: Tensor, counts: Sequence[int]
    ) -> list[Features]:
        """By request: CA's keys and values, (1, C, n, D); with `prompt_window` the position."""
        key, value = self.module.encode(kv_1NLK, position_ids_1N)
        sizes = list(counts)
        parts = [key.split(sizes, dim=2), value.split(sizes, dim=2)]
        if self.prompt_window:
            parts.append([part[0].item() for part in position_ids_1N[0].split(sizes)])
        return list(zip(*parts, strict=True))

    def append_features(self, row: int, features: Features) -> None:
        key_1CTD, value_1CTD, *first = features
        (start,) = first or (self.num_encoded.get(row, 0),)
        self.memory.append(row, start, key_1CTD, value_1CTD)
        self.mark_encoded(row, range(start, start + key_1CTD.shape[2]))

    def mark_encoded(self, row: int, tokens: range) -> None:
        """Note that `memory` has the features of these tokens; some may be encoded again."""
        if not self.first_encoded.get(row, 0) <= tokens.start <= self.num_encoded.get(row, 0):
            self.first_encoded[row] = tokens.start
        self.num_encoded[row] = tokens.stop

    def rollback(self, row: int, length: int) -> None:
        """Keep the first `length` tokens of a row; later slots are overwritten."""
        super().rollback(row, length)
        self.memory.cut(row, length)
        for ends in (self.num_encoded, self.first_encoded):
            ends[row] = min(ends.get(row, 0), length)
        if row in self.missing:
            self.missing[row] = {position for position in self.missing[row] if position < length}

    def close(self, row: int) -> None:
        super().close(row)
        self.memory.give_back(row)
        for kept in (self.num_encoded, self.first_encoded, self.missing):
            kept.pop(row, None)

    def release(self) -> None:
        super().release()
        self.memory.release()

    def draft_round(self, rows: Sequence[RequestText], shape: Tree) -> DraftRound:
        return MoADraftRound(self, rows, shape)


class MoADraftRound(DraftRound):
    """SA, CA and the reused target layers for the nodes of one round."""

    proposer: MoAProposer

    def __init__(self, proposer: MoAProposer, rows: Sequence[RequestText], shape: Tree) -> None:
        super().__init__(proposer, rows, shape)
        self.num_encoded = [proposer.num_encoded.get(row, 0) for row in self.cache_rows]
        self.first_encoded = [proposer.first_encoded.get(row, 0) for row in self.cache_rows]
        self.missing = [sorted(proposer.missing.get(row, ())) for row in self.cache_rows]

    def run_self_attention(self, batch: TokenBatch) -> Tensor:
        embeddings = self.proposer.target.embed(batch.token_ids_BT)
        decoder = self.proposer.module.decoder
        return decoder.run_self_attention(
            embeddings, decoder.self_rope(batch.position_ids_BT), self._attentions(batch)
        )

    def finish(self, x_BWE: Tensor, position_BW: Tensor, slots: DraftSlots) -> Tensor:
        module, num = self.proposer.module, self.proposer.num_target_layers
        decoder = module.decoder
        attend = (
            self._memory_with_drafts(x_BWE, position_BW, slots)
            if module.reads_drafts
            else self._memory
        )
        states_BWE = decoder.run_cross_attention(x_BWE, decoder.cross_rope(position_BW), attend)
        states_BWE = module.adapt(states_BWE, num)
        return self._run_reused_layers(states_BWE, position_BW, slots) if num else states_BWE

    @cached_property
    def _memory(self) -> StoredMemory:
        """CA's attention over verified tokens, the same for all nodes of the round."""
        mask_B11S = prefix_mask(self.num_encoded, max(self.num_encoded), self.device)
        mask_B11S = self.without_missing(mask_B11S)
        for i, first in enumerate(self.first_encoded):
            mask_B11S[i, ..., :first] = False
        return StoredMemory(self.proposer.memory, self.cache_rows, mask_B11S)

    def without_missing(self, mask: Tensor) -> Tensor:
        """A mask over positions that hides those without features."""
        for i, positions in enumerate(self.missing):
            if positions:
                mask[i, ..., positions] = False
        return mask

    def _memory_with_drafts(
        self, x_BWE: Tensor, position_BW: Tensor, slots: DraftSlots
    ) -> StoredMemory:
        """CA's memory with keys of these nodes, which lie behind the root as in the text cache."""
        memory, rows = self.proposer.memory, self.cache_rows
        width, visible = x_BWE.shape[1], max(self.roots) + slots.sees_BWU.shape[2]
        memory.reserve(max(rows) + 1, self.num_slots)
        write = memory.writer(rows, slots.starts, width, visible)
        write(0, *self.proposer.module.project_kv(x_BWE, position_BW))
        return StoredMemory(memory, rows, tree_mask(self.roots, slots.sees_BWU, visible))

    def _run_reused_layers(
        self, states_BWE: Tensor, position_BW: Tensor, slots: DraftSlots
    ) -> Tensor:
        """The target's last N layers and final norm over states of nodes, (B, W, E)."""
        target, cache = self.proposer.target, self.proposer.target_cache
        width, visible = states_BWE.shape[1], max(self.roots) + slots.sees_BWU.shape[2]
        assert cache is not None, "share_target_cache() comes before drafting with N > 0"
        cache.reserve(max(self.cache_rows) + 1, max(self.num_slots, visible))
        return target.layers.run(
            states_BWE,
            position_BW,
            num=self.proposer.num_target_layers,
            mask_B1TS=self.without_missing(tree_mask(self.roots, slots.sees_BWU, visible)),
            write=cache.writer(self.cache_rows, slots.starts, width, visible),
        )

    def fill_reused_layers(self, x_BTE: Tensor, starts: Sequence[int]) -> None:
        """With N > 0, compute keys and values of the reused layers for text without features.

        The newest tokens have no features when they are drafts themselves: drafted ahead of a
        verification, or while a link is down.

        Args:
            starts: text slot of the first of them, by row.
        """
        if not self.proposer.num_target_layers:
            return
        stops = [
            min(root, start + x_BTE.shape[1])
            for root, start in zip(self.roots, starts, strict=True)
        ]
        first = [
            min(max(start, num_encoded), stop)
            for start, num_encoded, stop in zip(starts, self.num_encoded, stops, strict=True)
        ]
        width = max(stop - start for stop, start in zip(stops, first, strict=True))
        if not width:
            return
        first_B1 = torch.tensor(first, device=self.device)[:, None]
        position_BW = first_B1 + torch.arange(width, device=self.device)
        offset_BW = position_BW - torch.tensor(starts, device=self.device)[:, None]
        offset_BW = offset_BW.clamp(0, x_BTE.shape[1] - 1)
        x_BWE = x_BTE.gather(1, offset_BW[..., None].expand(-1, -1, x_BTE.shape[2]))
        causal_WW = torch.ones(width, width, dtype=torch.bool, device=self.device).tril()
        # These tokens are like a chain of drafts whose root is the last token with features.
        roots, self.roots = self.roots, first
        self.finish(x_BWE, position_BW, DraftSlots(first, causal_WW.expand(len(first), -1, -1)))
        self.roots = roots
