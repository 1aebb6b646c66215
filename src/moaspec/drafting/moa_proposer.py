"""Drafting with a Mixture-of-Attentions drafter.

Legend: B rows, T new tokens, W beams of a level, S visible slots, E hidden size, C CA's KV heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moaspec.backends.cpu.cpu_attention import MOST_QUERIES
from moaspec.backends.cpu.fused_drafting import FusedExit, Grown, TreePart, draft_tree
from moaspec.backends.cpu.fused_layers import FusedStack, Slots
from moaspec.backends.cpu.matrix import Matrix
from moaspec.backends.fast_drafter import prepared
from moaspec.backends.pack import PackedLinear
from moaspec.drafting.draft_tree import Tree
from moaspec.drafting.kv_cache import KVCache, StoredMemory, prefix_mask, tree_mask
from moaspec.drafting.path_scores import coupling
from moaspec.drafting.protocols import Features, Need, RowText
from moaspec.drafting.tree_proposer import (
    DraftRound,
    DraftSlots,
    TokenBatch,
    TreeProposer,
)
from moaspec.errors import InputError
from moaspec.model.checkpoint.moa_checkpoint import check_target
from moaspec.model.layers import CrossAttend
from moaspec.model.moa import MoADrafter
from moaspec.target.decoder_layers import LastLayers
from moaspec.target.target import Target

MOST_ROWS = 8
"""Rows that kernels draft for one after another; PyTorch drafts for more of them together."""


class MoAProposer(TreeProposer):
    """Drafts with SA over the text and CA over what the encoder wrote of verified tokens.

    With N > 0 the drafted beams use the slots behind the root of the target's own cache, in the
    last N layers, which the verification then writes over.

    Args:
        drafter: the trained module.
        target: the target it drafts for.
        num_target_layers: N; None takes what the checkpoint records first.

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
        _check_place(drafter, target)
        layers = config.num_target_layers[0] if num_target_layers is None else num_target_layers
        if not 0 <= layers <= target.num_layers:
            raise InputError(
                f"num_target_layers must be within 0..{target.num_layers}, got {layers}."
            )
        if drafter.exits and layers not in config.num_target_layers:
            raise InputError(
                f"num_target_layers={layers}: this drafter has exits for "
                f"{', '.join(map(str, config.num_target_layers))}."
            )
        self.module, head = prepared(drafter, target)
        text = KVCache.of(target, config.self_attention)
        super().__init__(target, drafter.draft_token_ids, text, head)
        self.num_target_layers = layers
        self.target_cache: KVCache | None = None
        self.memory = KVCache.of(target, config.cross_attention)
        self.num_encoded: dict[int, int] = {}
        self.missing: dict[int, set[int]] = {}

    def share_target_cache(self, target_cache: KVCache) -> None:
        """Let N > 0 attend to the target's own cache, or to one that `place` fills."""
        self.target_cache = target_cache

    @torch.inference_mode()
    def encode(
        self, kv_1NLK: Tensor, position_ids_1N: Tensor, counts: Sequence[int]
    ) -> list[Features]:
        """CA's keys and values of N verified tokens, split by row: pairs of (1, C, n, D)."""
        key, value = self.module.encode(kv_1NLK, position_ids_1N)
        sizes = list(counts)
        return list(zip(key.split(sizes, dim=2), value.split(sizes, dim=2), strict=True))

    def observe(self, row: int, features: Features) -> None:
        """Append CA's keys and values of newly verified tokens."""
        self.place(row, self.num_encoded.get(row, 0), features)

    def place(
        self,
        row: int,
        start: int,
        features: Features,
        last_layers: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Take in features of verified tokens in any order; drafting does without missing ones.

        Args:
            row: which row.
            start: position of the first token.
            features: see `encode`.
            last_layers: where N > 0 and the target's cache is not in reach, keys and values of the
                last N target layers, (N, H, T, D of the target) each.
        """
        key_1CTD, value_1CTD = features
        stop = start + key_1CTD.shape[2]
        self.memory.reserve(row + 1, stop)
        self.memory.append(row, start, key_1CTD, value_1CTD)
        if last_layers is not None:
            assert self.target_cache is not None, "share_target_cache() comes before last layers"
            self.target_cache.reserve(row + 1, stop)
            self.target_cache.append_last(row, start, *last_layers)
        known = self.num_encoded.get(row, 0)
        if start > known or row in self.missing:
            missing = self.missing.get(row, set()) | set(range(known, start))
            self.missing[row] = missing.difference(range(start, stop))
        self.num_encoded[row] = max(known, stop)

    def rollback(self, row: int, length: int) -> None:
        """Forget all but a row's first tokens; what lies beyond is written over."""
        super().rollback(row, length)
        self.num_encoded[row] = min(self.num_encoded.get(row, 0), length)
        if row in self.missing:
            self.missing[row] = {position for position in self.missing[row] if position < length}

    def close(self, row: int) -> None:
        """Forget a row."""
        super().close(row)
        self.num_encoded.pop(row, None)
        self.missing.pop(row, None)

    def release(self) -> None:
        """Give the caches' memory back; no row may be in use."""
        super().release()
        self.memory.release()

    def level(self, rows: Sequence[RowText], shape: Tree) -> DraftRound:
        """The decoder's passes of one round."""
        return MoADraftRound(self, rows, shape)

    def kernels(self) -> KernelParts | None:
        """What they draft with; None where they lack a part."""
        module, target, num = self.module, self.target, self.num_target_layers
        sa, ca = (
            layer.stack for layer in (module.decoder.self_attention, module.decoder.cross_attention)
        )
        head = self.draft_head.matrix if isinstance(self.draft_head, PackedLinear) else None
        if sa is None or ca is None or head is None or target.embeddings is None:
            return None
        # Their probabilities are those of bare logits.
        if module.config.without or target.caps_logits:
            return None
        adapter, last = module.adapter(num), target.layers.last(num) if num else None
        if (num and last is None) or (adapter is not None and adapter.fused is None):
            return None
        exit_ = None if adapter is None else adapter.fused
        return KernelParts(sa, ca, head, target.embeddings, exit_, last)


@dataclass(frozen=True)
class KernelParts:
    """What kernels draft with: SA, CA, and where there are any, exit and last target layers."""

    text: FusedStack
    memory: FusedStack
    head: Matrix
    embeddings: Tensor
    exit_: FusedExit | None
    last: LastLayers | None


class MoADraftRound(DraftRound):
    """SA, CA, the reused layers."""

    drafting: MoAProposer

    def __init__(self, drafting: MoAProposer, rows: Sequence[RowText], shape: Tree) -> None:
        super().__init__(drafting, rows, shape)
        self.num_encoded = [drafting.num_encoded.get(row, 0) for row in self.indices]
        self.missing = [sorted(drafting.missing.get(row, ())) for row in self.indices]

    @cached_property
    def memory(self) -> StoredMemory:
        """What CA reads of verified tokens."""
        mask_B11S = prefix_mask(self.num_encoded, max(self.num_encoded), self.device)
        mask_B11S = self._without_missing(mask_B11S)
        return StoredMemory(self.drafting.memory, self.indices, mask_B11S)

    def run_self_attention(self, reading: TokenBatch) -> Tensor:
        """SA."""
        embeddings = self.drafting.target.embed(reading.token_ids_BT)
        (attend,) = self._attentions(reading)
        decoder = self.drafting.module.decoder
        return decoder.run_self_attention(
            embeddings, decoder.self_rope(reading.position_ids_BT), attend
        )

    def _without_missing(self, mask: Tensor) -> Tensor:
        """A mask over positions that hides those whose features have not come."""
        for i, positions in enumerate(self.missing):
            if positions:
                mask[i, ..., positions] = False
        return mask

    def fill_reused_layers(self, x_BTE: Tensor, starts: Sequence[int]) -> None:
        """With N > 0, give the reused layers keys and values of text without features, too.

        There is such text where the newest tokens are drafts themselves: drafted ahead of a
        verdict, or while a link is down.
        """
        remembered = self.drafting.num_encoded
        stops = [
            min(root, start + x_BTE.shape[1])
            for root, start in zip(self.roots, starts, strict=True)
        ]
        first = [
            min(max(start, remembered.get(row, 0)), stop)
            for start, row, stop in zip(starts, self.indices, stops, strict=True)
        ]
        width = max(stop - one for stop, one in zip(stops, first, strict=True))
        if not self.drafting.num_target_layers or not width:
            return
        first_B1 = torch.tensor(first, device=self.device)[:, None]
        position_BW = first_B1 + torch.arange(width, device=self.device)
        offset_BW = position_BW - torch.tensor(starts, device=self.device)[:, None]
        offset_BW = offset_BW.clamp(0, x_BTE.shape[1] - 1)
        x_BWE = x_BTE.gather(1, offset_BW[..., None].expand(-1, -1, x_BTE.shape[2]))
        causal_WW = torch.ones(width, width, dtype=torch.bool, device=self.device).tril()
        roots, self.roots = self.roots, first
        self.finish(x_BWE, position_BW, DraftSlots(first, causal_WW.expand(len(first), -1, -1)))
        self.roots = roots

    def finish(self, x_BWE: Tensor, position_BW: Tensor, own: DraftSlots) -> Tensor:
        """CA and the reused layers."""
        drafting = self.drafting
        attend = self._memory(x_BWE, position_BW, own)
        decoder = drafting.module.decoder
        states_BWE = decoder.run_cross_attention(x_BWE, decoder.cross_rope(position_BW), attend)
        states_BWE = drafting.module.exit(states_BWE, drafting.num_target_layers)
        if not drafting.num_target_layers:
            return states_BWE
        width, visible = states_BWE.shape[1], max(self.roots) + own.sees_BWU.shape[2]
        cache = self._reserve(max(self.slots, visible))
        return drafting.target.layers.run(
            states_BWE,
            position_BW,
            num=drafting.num_target_layers,
            mask_B1TS=self._without_missing(tree_mask(self.roots, own.sees_BWU, visible)),
            write=cache.writer(self.indices, own.starts, width, visible),
        )

    def grow(self, shape: Tree) -> list[Grown] | None:
        """By kernels, where they have all layers and no draft is read by CA."""
        drafting = self.drafting
        kernels = None if any(self.missing) else drafting.kernels()
        starts = [
            min(drafting.num_read.get(row, 0), root)
            for row, root in zip(self.indices, self.roots, strict=True)
        ]
        unread = max(root + 1 - start for root, start in zip(self.roots, starts, strict=True))
        if kernels is None or len(self.rows) > MOST_ROWS:
            return None
        if max(unread, shape.breadth) > MOST_QUERIES:
            return None
        if kernels.last is not None:
            self._reserve(self.slots)
        return [self._grown(place, start, shape, kernels) for place, start in enumerate(starts)]

    def _grown(self, place: int, start: int, shape: Tree, kernels: KernelParts) -> Grown:
        """The drafts of one row, of which SA has read what comes before `start`."""
        drafting, decoder = self.drafting, self.drafting.module.decoder
        row, root, known = self.rows[place], self.roots[place], self.num_encoded[place]
        # Reused layers also need what has no features yet.
        first = root if kernels.last is None else max(start, min(known, root))
        stop = root + shape.depth
        slots = Slots(drafting.text.data, [row.row], [start], root + 1)
        remembered = Slots(drafting.memory.data, [row.row], [0], known)
        drafts = draft_tree(
            row.token_ids[start:],
            shape.depth,
            shape.breadth,
            shape.least_log_p,
            text=TreePart(kernels.text, *decoder.self_rope.along(start, stop), slots),
            memory=TreePart(kernels.memory, *decoder.cross_rope.along(first, stop), remembered),
            exit_=kernels.exit_,
            last=None if kernels.last is None else self._last(kernels.last, place, first, stop),
            finished=root + 1 - first,
            head=kernels.head,
            names_O=drafting.vocabulary_ids,
            embeddings_VE=kernels.embeddings,
            coupling=coupling(row),
        )
        drafting.num_read[row.row] = root + 1
        return drafts

    def _last(self, reused: LastLayers, place: int, first: int, stop: int) -> TreePart:
        """The target's last layers over tokens from `first` to the root, then over drafts."""
        cache = self.drafting.target_cache
        assert cache is not None
        return TreePart(
            reused.stack,
            *reused.angles.between(first, stop),
            Slots(cache.data, [self.indices[place]], [first], self.roots[place] + 1),
            num=self.drafting.num_target_layers,
            norm=reused.norm,
        )

    def _reserve(self, slots: int) -> KVCache:
        """Room for drafts among the target's own keys and values."""
        cache = self.drafting.target_cache
        assert cache is not None, "share_target_cache() comes before drafting with N > 0"
        cache.reserve(max(self.indices) + 1, slots)
        return cache

    def _memory(self, x_BWE: Tensor, position_BW: Tensor, own: DraftSlots) -> CrossAttend:
        """What CA reads; drafts, where it reads them too, lie behind the root, as in the text."""
        drafting = self.drafting
        if not drafting.module.reads_drafts:
            return self.memory
        width, visible = x_BWE.shape[1], max(self.roots) + own.sees_BWU.shape[2]
        drafting.memory.reserve(max(self.indices) + 1, self.slots)
        write = drafting.memory.writer(self.indices, own.starts, width, visible)
        write(0, *drafting.module.project_kv(x_BWE, position_BW))
        mask = tree_mask(self.roots, own.sees_BWU, visible)
        return StoredMemory(drafting.memory, self.indices, mask)


def drafts_behind(drafter: MoADrafter, num_target_layers: int) -> bool:
    """Whether it can draft, beside its target, on features that end before the text does.

    Reused layers cannot: what stands for the rest would overwrite the target's own keys and values.
    Neither can a CA that reads drafts, which lie where the text's features would.

    Args:
        drafter: the trained module.
        num_target_layers: N.
    """
    return num_target_layers == 0 and not drafter.reads_drafts


def _check_place(drafter: MoADrafter, target: Target) -> None:
    """Refuse weights that the target's keys, values and embeddings cannot be multiplied with."""
    expected = target.dtype, target.device  # asking a model takes a walk through its parameters
    for parameter in drafter.parameters():
        got = parameter.dtype, parameter.device
        if got != expected:
            raise InputError(
                f"The drafter is in {got[0]} on {got[1]}, and the target in {expected[0]} on "
                f"{expected[1]}. Call drafter.to({str(expected[1])!r}, {expected[0]}) first."
            )
