"""Drafting with the baselines: EAGLE's head, an independent small language model.

Legend: B rows, T new tokens, W beams of a level, U drafted slots, E hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moaspec.drafting.kv_cache import KVCache
from moaspec.drafting.tree_proposer import DraftRound, DraftSlots, TokenBatch, TreeProposer
from moaspec.model.baselines import Baseline, EagleDrafter, IndependentDrafter
from moaspec.target.target import Target
from moaspec_core.drafting.draft_tree import Tree
from moaspec_core.drafting.protocols import Features, Need, RequestText


class EagleProposer(TreeProposer):
    """Needs the target's final state of every verified token."""

    needs: frozenset[Need] = frozenset({"final_states"})
    token_offset = 1

    def __init__(self, module: EagleDrafter, target: Target) -> None:
        super().__init__(target, *_parts(module, target))
        self.module = module
        self.hidden: dict[int, Tensor] = {}

    def encode(
        self, hidden_1NE: Tensor, _position_ids_1N: Tensor, counts: Sequence[int]
    ) -> list[Features]:
        """The states themselves, split by row: (n, E) each."""
        return list(hidden_1NE[0].split(list(counts)))

    def append_features(self, row: int, features: Features) -> None:
        known = self.hidden.get(row)
        self.hidden[row] = features if known is None else torch.cat((known, features))

    def rollback(self, row: int, length: int) -> None:
        super().rollback(row, length)
        if row in self.hidden:
            self.hidden[row] = self.hidden[row][:length]

    def close(self, row: int) -> None:
        super().close(row)
        self.hidden.pop(row, None)

    def draft_round(self, rows: Sequence[RequestText], shape: Tree) -> DraftRound:
        return _EagleRound(self, rows, shape)


class _EagleRound(DraftRound):
    proposer: EagleProposer

    def __init__(self, proposer: EagleProposer, rows: Sequence[RequestText], shape: Tree) -> None:
        super().__init__(proposer, rows, shape)
        self._states_BUE: Tensor | None = None

    def run_self_attention(self, batch: TokenBatch) -> Tensor:
        """True states with the text, predictions with drafts."""
        (attend,), module = self._attentions(batch), self.proposer.module
        embeddings = self.proposer.target.embed(batch.token_ids_BT)
        return module.read(embeddings, self._hidden(batch), batch.position_ids_BT, attend)

    def _hidden(self, batch: TokenBatch) -> Tensor:
        """The state that belongs to each token's predecessor, (B, T, E)."""
        if batch.parent_slots_BT is not None:
            assert self._states_BUE is not None, "the root comes first"
            index = batch.parent_slots_BT[..., None].expand(-1, -1, self._states_BUE.shape[-1])
            return self._states_BUE.gather(1, index)
        stop = batch.token_ids_BT.shape[1]
        known = [
            self.proposer.hidden[row][start : start + stop]
            for row, start in zip(self.cache_rows, batch.starts, strict=True)
        ]
        return torch.stack(
            [torch.nn.functional.pad(one, (0, 0, 0, stop - len(one))) for one in known]
        )

    def finish(self, x_BWE: Tensor, _position_BW: Tensor, _slots: DraftSlots) -> Tensor:
        """Keep predictions for the children of these nodes."""
        known = [] if self._states_BUE is None else [self._states_BUE]
        self._states_BUE = torch.cat([*known, x_BWE], dim=1)
        return x_BWE


class IndependentProposer(TreeProposer):
    """Needs nothing of the target but its embeddings and its head."""

    def __init__(self, module: IndependentDrafter, target: Target) -> None:
        super().__init__(target, *_parts(module, target))
        self.module = module

    def draft_round(self, rows: Sequence[RequestText], shape: Tree) -> DraftRound:
        return _IndependentRound(self, rows, shape)


class _IndependentRound(DraftRound):
    proposer: IndependentProposer

    def run_self_attention(self, batch: TokenBatch) -> Tensor:
        module = self.proposer.module
        embeddings = self.proposer.target.embed(batch.token_ids_BT)
        return module.read(embeddings, batch.position_ids_BT, self._attentions(batch))


def _parts(module: Baseline, target: Target) -> tuple[Tensor | None, KVCache, nn.Module]:
    """Draft vocabulary, cache of the text, and head of a baseline."""
    ids, config = module.draft_token_ids, module.config
    return ids, KVCache(target, config.layer, config.num_layers), target.draft_head(ids)
