"""Drafting with another language model of the same vocabulary.

Legend: B rows, T new tokens, E hidden size of the drafting model.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moaspec.drafting.kv_cache import KVCache
from moaspec.drafting.tree_proposer import DraftRound, TokenBatch, TreeProposer
from moaspec.target.spec import TargetSpec
from moaspec.target.target import Target
from moaspec_core.drafting.draft_tree import Tree
from moaspec_core.drafting.protocols import RequestText
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.errors import InputError, MismatchError


class ModelProposer(TreeProposer):
    """Drafts with a language model, usually a small one of the target's family.

    It needs nothing of the target: it reads the whole text by itself, prompt included. An object
    holds requests of one engine only. Source: arXiv 2211.17192.

    Args:
        model: drafts; a target as `moaspec.load_target` returns it.
        target: the model whose text is drafted.

    Raises:
        InputError, MismatchError: see `check_drafting_model`.
    """

    usual_shape = Chain(4)  # each draft costs a pass of the model, so branches do not pay

    def __init__(self, model: Target, target: TargetSpec) -> None:
        check_drafting_model(model, target)
        wider = model.vocab_size > target.vocab_size  # by rows without a token
        ids = torch.arange(target.vocab_size, device=model.device) if wider else None
        super().__init__(model, ids, KVCache(model), model.draft_head(ids))

    def draft_round(self, rows: Sequence[RequestText], shape: Tree) -> DraftRound:
        return _ModelRound(self, rows, shape)


class _ModelRound(DraftRound):
    proposer: ModelProposer

    def run_self_attention(self, batch: TokenBatch) -> Tensor:
        """All layers of the model, and its final norm."""
        model, cache = self.proposer.target, self.proposer.text_cache
        width, visible = batch.token_ids_BT.shape[1], batch.mask.shape[-1]
        return model.run(
            batch.token_ids_BT,
            batch.position_ids_BT,
            mask_B1TS=batch.mask,
            write=cache.writer(self.cache_rows, batch.starts, width, visible),
        )


def check_drafting_model(model: TargetSpec, target: TargetSpec) -> None:
    """Refuse a model that cannot draft for a target; neither needs weights.

    Raises:
        MismatchError: their tokens differ, so that drafts would be other words.
        InputError: some of the model's layers have states that cannot be taken back.
    """
    if model.state_bytes:
        raise InputError(
            f"{model.name} cannot draft: some of its layers keep recurrent states, which rejected "
            "drafts would spoil. Name a model with attention in all layers."
        )
    hashes = (model.identity.tokenizer_hash, target.identity.tokenizer_hash)
    if None not in hashes and hashes[0] != hashes[1]:
        raise MismatchError(
            f"{model.name} cannot draft for {target.name}: their tokenizers differ, so its drafts "
            "would be other words. Name a model of the same family."
        )
