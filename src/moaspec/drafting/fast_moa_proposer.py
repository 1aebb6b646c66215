"""`MoAProposer` with packed weights, whose trees CPU kernels grow where they can.

Legend: E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moaspec.backends.cpu.cpu_attention import MAX_QUERIES, fast_attention
from moaspec.backends.cpu.fused_drafting import Coupling, FusedExit, TreePart, draft_tree
from moaspec.backends.cpu.fused_layers import FusedStack, Slots
from moaspec.backends.cpu.matrix import Matrix
from moaspec.backends.fast_drafter import (
    FastAttentionBlock,
    FastExitAdapter,
    FastTargetEncoder,
    prepared,
)
from moaspec.backends.fast_target import FastDecoderLayers, LastLayers
from moaspec.backends.pack import PackedLinear
from moaspec.drafting.draft_noise import SHARPNESS
from moaspec.drafting.draft_tree import Tree
from moaspec.drafting.moa_proposer import MoAProposer
from moaspec.drafting.path_scores import AGREEMENT
from moaspec.drafting.protocols import Features, RequestText
from moaspec.drafting.tree_proposer import CandidateNodes
from moaspec.model.moa import MoADrafter
from moaspec.sampling.choose import sampler_params
from moaspec.target.target import Target

MAX_KERNEL_ROWS = 8
"""Most requests that kernels draft for, one after another; PyTorch drafts for more together."""


class FastMoAProposer(MoAProposer):
    """A `MoAProposer` that uses kernels in every round that they support."""

    def __init__(
        self, drafter: MoADrafter, target: Target, *, num_target_layers: int | None = None
    ) -> None:
        super().__init__(drafter, target, num_target_layers=num_target_layers)
        self.text_cache.attend = self.memory.attend = fast_attention

    def modules(self, drafter: MoADrafter, target: Target) -> tuple[MoADrafter, nn.Module]:
        return prepared(drafter, target)

    def adopt(self, drafter: MoADrafter) -> None:
        """Draft with another version of the drafter from the next round on.

        Its encoder is the same, so the features of verified tokens stay. SA reads each text again.
        """
        self.module, self.draft_head = self.modules(drafter, self.target)
        self.num_read.clear()

    def encode_stored(self, kv_TLJ2D: Tensor, tokens: range) -> Features:
        """`encode` for one request; kernels read the target's cache in place."""
        encoder, encoded = self.module.encoder, None
        if isinstance(encoder, FastTargetEncoder):
            encoded = encoder.encode_stored(kv_TLJ2D, tokens)
        if encoded is None:
            positions_1T = torch.arange(tokens.start, tokens.stop, device=self.device)[None]
            return self.encode(kv_TLJ2D.flatten(2)[None], positions_1T, [len(tokens)])[0]
        return (*encoded, tokens.start) if self.prompt_window else encoded

    def grow(self, rows: Sequence[RequestText], shape: Tree) -> list[CandidateNodes]:
        """Grow each tree by kernels, one request after another; without them as `MoAProposer`."""
        parts = self.kernel_parts()
        roots = [len(row.token_ids) - 1 for row in rows]
        starts = [
            min(self.num_read.get(row.cache_row, 0), root)
            for row, root in zip(rows, roots, strict=True)
        ]
        unread = max(root + 1 - start for root, start in zip(roots, starts, strict=True))
        if (
            parts is None
            or any(self.missing.get(row.cache_row) for row in rows)
            or len(rows) > MAX_KERNEL_ROWS
            or max(unread, shape.breadth) > MAX_QUERIES
        ):
            return super().grow(rows, shape)
        num_rows = max(row.cache_row for row in rows) + 1
        num_slots = max(roots) + 1 + (shape.depth - 1) * shape.breadth
        self.text_cache.reserve(num_rows, num_slots)
        if parts.last is not None:
            assert self.target_cache is not None, "share_target_cache() comes before N > 0"
            self.target_cache.reserve(num_rows, num_slots)
        return [
            self._grow_one(row, start, shape, parts)
            for row, start in zip(rows, starts, strict=True)
        ]

    def kernel_parts(self) -> KernelParts | None:
        """The layers for the kernels; None where they lack one."""
        module, target, num = self.module, self.target, self.num_target_layers
        sa, ca = module.decoder.self_attention, module.decoder.cross_attention
        if not isinstance(sa, FastAttentionBlock) or not isinstance(ca, FastAttentionBlock):
            return None
        head = self.draft_head.matrix if isinstance(self.draft_head, PackedLinear) else None
        if head is None or target.embeddings is None:
            return None
        # Kernels compute probabilities from logits without a soft cap or scale.
        lm_head = target.lm_head
        if module.config.without or lm_head.cap is not None or lm_head.scale != 1.0:
            return None
        adapter, layers = module.adapter(num), target.layers
        last = layers.last(num) if num and isinstance(layers, FastDecoderLayers) else None
        exit_ = adapter.fused if isinstance(adapter, FastExitAdapter) else None
        if (num and last is None) or (adapter is not None and exit_ is None):
            return None
        return KernelParts(sa.stack, ca.stack, head, target.embeddings, exit_, last)

    def _grow_one(
        self, row: RequestText, start: int, shape: Tree, parts: KernelParts
    ) -> CandidateNodes:
        """The drafts of one request; SA has processed the tokens before `start`."""
        decoder, root = self.module.decoder, len(row.token_ids) - 1
        num_encoded = self.num_encoded.get(row.cache_row, 0)
        hidden = self.first_encoded.get(row.cache_row, 0)
        # Reused layers also need the tokens without features.
        first = root if parts.last is None else max(start, min(num_encoded, root))
        stop = root + shape.depth
        text = Slots(self.text_cache.data, [row.cache_row], [start], root + 1)
        memory_data = self.memory.data[..., hidden:, :]
        memory = Slots(memory_data, [row.cache_row], [0], num_encoded - hidden)
        drafts = draft_tree(
            row.token_ids[start:],
            shape.depth,
            shape.breadth,
            shape.least_log_p,
            text=TreePart(parts.text, *decoder.self_rope.along(start, stop), text),
            memory=TreePart(parts.memory, *decoder.cross_rope.along(first, stop), memory),
            exit_=parts.exit_,
            last=None if parts.last is None else self._last(parts.last, row, first, stop),
            finished=root + 1 - first,
            head=parts.head,
            names_O=self.vocabulary_ids,
            embeddings_VE=parts.embeddings,
            coupling=coupling(row),
        )
        self.num_read[row.cache_row] = root + 1
        return CandidateNodes(*drafts)

    def _last(self, reused: LastLayers, row: RequestText, first: int, stop: int) -> TreePart:
        """The target's last layers over tokens from `first` to the root, then over drafts."""
        assert self.target_cache is not None
        return TreePart(
            reused.stack,
            *reused.angles.between(first, stop),
            Slots(self.target_cache.data, [row.cache_row], [first], len(row.token_ids)),
            num=self.num_target_layers,
            norm=reused.norm,
        )


@dataclass(frozen=True)
class KernelParts:
    """The drafter's layers for kernels; `exit_` and `last` are None where there are none."""

    text: FusedStack
    memory: FusedStack
    head: Matrix
    embeddings: Tensor
    exit_: FusedExit | None
    last: LastLayers | None


def coupling(row: RequestText) -> Coupling | None:
    """The order of `Ranking` in the kernels' form; None for a request that does not sample."""
    if not row.sampling.samples:
        return None
    return Coupling(
        sampler_params(row.sampling, len(row.token_ids), sharpness=SHARPNESS), AGREEMENT
    )
