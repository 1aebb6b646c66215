"""Drafting with baselines whose weights are packed and whose attention is a kernel."""

from collections.abc import Callable
from typing import Any, TypeVar

from moaspec.backends.cpu.cpu_attention import fast_attention
from moaspec.backends.fast_drafter import packed_copy
from moaspec.backends.fast_heads import fast_draft_head
from moaspec.drafting.other_proposers.baseline_proposers import EagleProposer, IndependentProposer
from moaspec.model.baselines import Baseline, EagleDrafter, IndependentDrafter
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
    return PROPOSERS[module.kind](module, target)


PROPOSERS: dict[str, Callable[[Any, Target], Proposer]] = {
    EagleDrafter.kind: lambda module, target: accelerated(EagleProposer(module, target)),
    IndependentDrafter.kind: lambda module, target: accelerated(
        IndependentProposer(module, target)
    ),
}
"""How each kind of `moaspec.model.baselines.KINDS` drafts."""
