"""Distillation losses.

Legend: M queries with loss, E hidden size, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LogitsOf = Callable[[Tensor], Tensor]
"""(M, E) states -> (M, V) float32 logits over the draft vocabulary."""


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """Weights of the sum that is minimised.

    Attributes:
        feature: smooth-L1 between the final states of drafter and target (the paper: 1.0).
        kl: forward KL from the target's distribution to the drafter's (the paper: 0.1).
        summary: smooth-L1 between the aggregate of a token and the target's final state of it (not
            in the paper). It teaches LSA directly, before CA has learned to read its output.
    """

    feature: float = 1.0
    kl: float = 0.1
    summary: float = 0.0


@dataclass(frozen=True)
class LossParts:
    """Sums over queries, so that they can be normalised over any number of batches.

    Attributes:
        total: weighted loss.
        feature: smooth-L1 between final states, mean over E.
        kl: forward KL from the target's distribution to the drafter's.
        hits: queries whose most likely draft is the target's most likely token.
        count: queries.
    """

    total: float
    feature: float
    kl: float
    hits: int
    count: int


def feature_loss(drafted_ME: Tensor, target_ME: Tensor) -> Tensor:
    """Smooth-L1 (beta 1), mean over E, summed over queries. Source: the paper, section 4.4."""
    return F.smooth_l1_loss(drafted_ME, target_ME, reduction="none").mean(-1).sum()


def forward_kl(drafted_MV: Tensor, target_MV: Tensor) -> Tensor:
    """KL(p || q) of target p and drafter q from logits, summed over queries."""
    log_p, log_q = target_MV.log_softmax(-1), drafted_MV.log_softmax(-1)
    return F.kl_div(log_q, log_p, log_target=True, reduction="sum")


def backward_in_chunks(
    drafted_ME: Tensor,
    target_ME: Tensor,
    logits_of: LogitsOf,
    *,
    weights: LossWeights,
    summary: Tensor | None = None,
    chunk: int = 512,
) -> LossParts:
    """Compute the mean loss and backpropagate it, holding `chunk` x V logits at a time.

    Args:
        drafted_ME: the drafter's final states, with a graph behind them.
        target_ME: the target's states after its final norm.
        logits_of: the LM head (restricted to the draft vocabulary).
        weights: of the losses.
        summary: mean summary loss, with a graph behind it; None leaves it out.
        chunk: queries whose logits exist at once.

    Returns:
        Sums over the M queries; gradients of the *mean* have been accumulated.
    """
    leaf_ME = drafted_ME.detach().requires_grad_()
    sums = torch.zeros(3)
    hits = 0
    for drafted, target in zip(leaf_ME.split(chunk), target_ME.split(chunk), strict=True):
        with torch.no_grad():
            target_logits = logits_of(target)
        drafted_logits = logits_of(drafted)
        feature, kl = feature_loss(drafted, target), forward_kl(drafted_logits, target_logits)
        total = weights.feature * feature + weights.kl * kl
        (total / len(leaf_ME)).backward()
        sums += torch.stack((total, feature, kl)).detach().cpu()
        hits += int((drafted_logits.argmax(-1) == target_logits.argmax(-1)).sum())
    roots, gradients = [drafted_ME], [leaf_ME.grad]
    if summary is not None and weights.summary:
        roots.append(weights.summary * summary)
        gradients.append(None)
    torch.autograd.backward(roots, gradients)
    total_sum, feature_sum, kl_sum = sums.tolist()
    return LossParts(total_sum, feature_sum, kl_sum, hits, len(leaf_ME))
