"""Drafting with baselines whose weights are packed and whose attention is a kernel."""

from typing import TypeVar

from moaspec.backends.cpu.cpu_attention import fast_attention
from moaspec.backends.fast_drafter import packed_copy
from moaspec.backends.fast_heads import fast_draft_head
from moaspec.drafting.other_proposers.baseline_proposers import EagleProposer, IndependentProposer
from moaspec.model.baselines import Baseline, EagleDrafter
from moaspec.target.target import Target
from moaspec_core.drafting.protocols import Proposer

P = TypeVar("P", EagleProposer, IndependentProposer)


def accelerated(proposer: P) -> P:
    """The same proposer with the fastest module, head and attention on this CPU."""
    ids = proposer.module.draft_token_ids
    proposer.draft_head = fast_draft_head(proposer.target, ids)
    proposer.module = packed_copy(proposer.module)
    proposer.text_cache.attend = fast_attention
    return proposer


def baseline_drafting(module: Baseline, target: Target) -> Proposer:
    """The `Proposer` of a trained baseline."""
    if isinstance(module, EagleDrafter):
        return accelerated(EagleProposer(module, target))
    return accelerated(IndependentProposer(module, target))
