"""`MoAProposer` with packed weights, whose trees CPU kernels grow where they can.

Legend: E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from moaspec.backends.cpu.cpu_attention import MAX_ATTENDED, fast_attention
from moaspec.backends.cpu.embeddings import kernels_embed
from moaspec.backends.cpu.fused_drafting import Coupling, FusedDrafter
from moaspec.backends.cpu.fused_layers import FusedStack, TextStack
from moaspec.backends.fast_drafter import (
    FastAttentionBlock,
    FastExitAdapter,
    FastTargetEncoder,
    angle_rows,
    prepared,
)
from moaspec.backends.fast_target import FastDecoderLayers, LastLayers
from moaspec.backends.pack import PackedLinear
from moaspec.drafting.kv_cache import KVCache
from moaspec.drafting.moa_proposer import MoAProposer
from moaspec.drafting.path_scores import AGREEMENT
from moaspec.drafting.tree_proposer import CandidateNodes
from moaspec.model.moa import MoADrafter
from moaspec.sampling.choose import sampler_params
from moaspec.target.target import Target
from moaspec_core.drafting.draft_noise import SHARPNESS
from moaspec_core.drafting.draft_tree import Tree
from moaspec_core.drafting.protocols import RequestText

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
        module, head = prepared(drafter, target)
        # A module finds its children slowly, and a device's has no encoder.
        self._encoder = getattr(module, "encoder", None)
        self._kernels: FusedDrafter | None = None
        self._hooks: tuple[Mapping[int, Any], ...] = ()  # of the embedding
        return module, head

    def use_exit(self, num_target_layers: int) -> None:
        super().use_exit(num_target_layers)
        self._kernels = None

    def adopt(self, drafter: MoADrafter) -> None:
        """Draft with another version of the drafter from the next round on.

        Its encoder is the same, so the features of verified tokens stay. SA reads each text again.
        """
        self.module, self.draft_head = self.modules(drafter, self.target)
        self.num_read.clear()

    def encode_and_append(self, cache: KVCache, row: int, tokens: range) -> bool:
        """Kernels read and write the caches in place; without them as `MoAProposer`."""
        self.memory.hold(row, tokens.stop)
        encoder, in_place = self._encoder, False
        if isinstance(encoder, FastTargetEncoder):
            in_place = encoder.encode_stored(cache.data, row, tokens, self.memory.data)
        if not in_place:
            positions_1T = torch.arange(tokens.start, tokens.stop, device=self.device)[None]
            kv_1TLK = cache.features(row, tokens.start, tokens.stop)
            ((key_1CTD, value_1CTD, *_),) = self.encode(kv_1TLK, positions_1T, [len(tokens)])
            self.memory.append(row, tokens.start, key_1CTD, value_1CTD)
        self.mark_encoded(row, tokens)
        return True

    def grow(self, rows: Sequence[RequestText], shape: Tree) -> list[CandidateNodes]:
        """Grow each tree by kernels, one request after another; without them as `MoAProposer`."""
        kernels = self.kernel_parts()
        starts = [min(self.num_read.get(row.cache_row, 0), len(row.token_ids) - 1) for row in rows]
        finished = list(map(self._num_finished, rows, starts))
        if (
            kernels is None
            or any(self.missing.get(row.cache_row) for row in rows)
            or len(rows) > MAX_KERNEL_ROWS
            or max(shape.breadth, *finished) > MAX_ATTENDED
        ):
            return super().grow(rows, shape)
        nodes = []
        for row, start, count in zip(rows, starts, finished, strict=True):
            self._begin(kernels, row, start, count, shape)
            sizes = shape.depth, shape.breadth, shape.least_log_p
            drafts = kernels.draft_tree(row.token_ids[start:], count, sizes, coupling(row))
            self.num_read[row.cache_row] = len(row.token_ids)
            nodes.append(CandidateNodes(*drafts))
        return nodes

    def _num_finished(self, row: RequestText, start: int) -> int:
        """How many tokens from `start` on CA processes.

        The root; with N > 0 also tokens before it that have no features.
        """
        length = len(row.token_ids)
        if not self.num_target_layers:
            return 1
        return min(length - start, max(1, length - self.num_encoded.get(row.cache_row, 0)))

    def _begin(
        self, kernels: FusedDrafter, row: RequestText, start: int, finished: int, shape: Tree
    ) -> None:
        """Hand a request's caches to the kernels.

        Args:
            start: first unread token.
            finished: how many tokens CA processes.
        """
        cache_row, length = row.cache_row, len(row.token_ids)
        num_encoded = self.num_encoded.get(cache_row, 0)
        hidden = self.first_encoded.get(cache_row, 0)
        first, stop = length - finished, length - 1 + shape.depth
        num_slots = length + (shape.depth - 1) * shape.breadth
        self.text_cache.hold(cache_row, num_slots)
        kernels.text.begin(self.text_cache.data, cache_row, start, stop, length)
        if kernels.last is not None:
            assert self.target_cache is not None, "share_target_cache() comes before N > 0"
            self.target_cache.hold(cache_row, num_slots)
            kernels.last.begin(self.target_cache.data, cache_row, first, stop, length)
        memory = self.memory.data[..., hidden:, :] if hidden else self.memory.data
        kernels.memory.begin(memory, cache_row, first, stop, num_encoded - hidden)

    def kernel_parts(self) -> FusedDrafter | None:
        """The drafter's layers for kernels; None where they lack one, or while one has hooks."""
        num, layers = self.num_target_layers, self.target.layers
        last = layers.last(num) if num and isinstance(layers, FastDecoderLayers) else None
        if self._kernels is None or any(self._hooks) or (num and last is None):
            self._kernels = self._new_kernels(last)
        return self._kernels

    def _new_kernels(self, last: LastLayers | None) -> FusedDrafter | None:
        target, num, decoder = self.target, self.num_target_layers, self.module.decoder
        layers, ca = decoder.text_layers, decoder.cross_attention
        fast = [one for one in layers if isinstance(one, FastAttentionBlock)]
        if len(fast) < len(layers) or not isinstance(ca, FastAttentionBlock):
            return None
        head = self.draft_head.matrix if isinstance(self.draft_head, PackedLinear) else None
        embeddings = target.embeddings
        if head is None or not kernels_embed(embeddings):
            return None
        # Kernels compute probabilities from logits without a soft cap or scale.
        lm_head = target.lm_head
        if self.module.config.without or lm_head.cap is not None or lm_head.scale != 1.0:
            return None
        adapter = self.module.adapter(num)
        exit_ = adapter.fused if isinstance(adapter, FastExitAdapter) else None
        if (num and last is None) or (adapter is not None and exit_ is None):
            return None
        table = target.model.base_model.embed_tokens
        self._hooks = table._forward_hooks, table._forward_pre_hooks
        sa = FusedStack([one.fused for one in fast], fast[0].stack.scale, moved=False)
        text = TextStack(sa, angle_rows(decoder.self_rope), num=len(fast))
        memory = TextStack(ca.stack, angle_rows(decoder.cross_rope))
        reused = None
        if last is not None:
            reused = TextStack(last.stack, last.angles.rows, num=num, norm=last.norm)
        return FusedDrafter(
            *(text, memory, reused),
            exit_,
            head=head,
            names_O=self.vocabulary_ids.contiguous(),
            table=embeddings,
        )


def coupling(row: RequestText) -> Coupling | None:
    """The order of `Ranking` in the kernels' form; None for a request that does not sample."""
    if not row.sampling.samples:
        return None
    return Coupling(
        sampler_params(row.sampling, len(row.token_ids), sharpness=SHARPNESS), AGREEMENT
    )
