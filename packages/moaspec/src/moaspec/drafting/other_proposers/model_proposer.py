"""Drafting with another language model of the same vocabulary.

Legend: B rows, T new tokens, E hidden size of the drafting model.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moaspec.drafting.kv_cache import KVCache
from moaspec.drafting.tree_proposer import (
    READ_CHUNK_TOKENS,
    DraftRound,
    TokenBatch,
    TreeProposer,
)
from moaspec.target.spec import TargetSpec
from moaspec.target.target import Target
from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.drafting.protocols import RequestText
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.errors import InputError, MismatchError

FEW_TOKENS = 16
"""A text with more unread tokens is read alone: in one pass, all rows would be as long."""


class ModelProposer(TreeProposer):
    """Drafts with a language model, usually a small one of the target's family.

    It needs nothing of the target: it reads the whole text by itself, prompt included. An object
    holds requests of one engine only. Source: arXiv 2211.17192.

    A text whose tokens the model lacks, or that is longer than its context, gets no drafts. Nor
    does a long prompt while it is read, `READ_CHUNK_TOKENS` tokens in each round.

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
        self._lacks_tokens = model.vocab_size < target.vocab_size

    def propose(self, rows: Sequence[RequestText], shape: Tree) -> list[DraftTree]:
        trees = [DraftTree()] * len(rows)
        ready = [i for i, row in enumerate(rows) if self._is_read(row, shape, len(rows))]
        if ready:
            drafted = super().propose([rows[i] for i in ready], shape)
            for i, tree in zip(ready, drafted, strict=True):
                trees[i] = tree
        return trees

    @torch.inference_mode()
    def _is_read(self, row: RequestText, shape: Tree, num_rows: int) -> bool:
        """Read a chunk of a long text; whether the model can draft for the text in this round."""
        ids, model = row.token_ids, self.target
        if len(ids) + shape.depth > model.max_positions:
            return False
        if self._lacks_tokens and max(ids) >= model.vocab_size:
            return False
        stop = self.num_read.get(row.cache_row, 0) + READ_CHUNK_TOKENS
        if len(ids) > stop or (num_rows > 1 and len(ids) > stop - READ_CHUNK_TOKENS + FEW_TOKENS):
            with model.limited_threads():
                self.draft_round([replace(row, token_ids=ids[:stop])], shape).read_root()
        return len(ids) <= stop

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

    Models of one family may have different numbers of unused ids.

    Raises:
        MismatchError: an id is one token here and another there, so drafts would be other words.
        InputError: some of the model's layers have states that cannot be taken back.
    """
    if model.state_bytes:
        raise InputError(
            f"{model.name} cannot draft: some of its layers keep recurrent states, which rejected "
            "drafts would spoil. Name a model with attention in all layers."
        )
    if None in (model.tokenizer, target.tokenizer):
        return
    ours, theirs = _tokens(model), _tokens(target)
    wrong = next((i for i, text in ours.items() if theirs.get(i, text) != text), None)
    if wrong is not None:
        raise MismatchError(
            f"{model.name} cannot draft for {target.name}: token {wrong} is {ours[wrong]!r} for "
            f"one and {theirs[wrong]!r} for the other. Name a model of the same family."
        )


def _tokens(model: TargetSpec) -> dict[int, str]:
    """Texts of tokens by their ids."""
    assert model.tokenizer is not None
    return {index: text for text, index in model.tokenizer.get_vocab().items()}
