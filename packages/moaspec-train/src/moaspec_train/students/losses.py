"""Distillation losses.

Legend: M queries with loss, T tokens of all texts, E hidden size, V draft vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from moaspec_core.errors import InputError

LogitsFunction = Callable[[Tensor], Tensor]
"""(M, E) states -> (M, V) float32 logits over the draft vocabulary."""
Divergence = Literal["forward_kl", "negative_log_acceptance", "hybrid"]
MAX_CHUNK = 512  # largest number of queries whose logits are in memory at once
MIN_LOG_PROBABILITY = -80.0  # lower bound of log-probabilities: e^-80 adds nothing to a float32 sum
MIN_ACCEPTANCE = 1e-6
"""Lower bound of an acceptance probability whose logarithm is taken, or that divides."""
HYBRID_DECAY = 3.0
"""Decay of KL's share in "hybrid" with the acceptance probability (eta of arXiv 2602.23881)."""
MAX_CPU_LOGITS = 2**22
"""Logits in memory at once on a CPU: 16 MB stay in its caches and are reused by the allocator."""


def logit_chunk_size(num_logits: int, device: torch.device) -> int:
    """Number of queries whose logits are computed at once."""
    return (
        MAX_CHUNK if device.type != "cpu" else max(32, min(MAX_CHUNK, MAX_CPU_LOGITS // num_logits))
    )


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """Weights of the terms of the loss.

    Attributes:
        feature: smooth-L1 between states of drafter and target (the paper: 1.0).
        kl: divergence between their distributions (the paper: 0.1).
        summary: smooth-L1 between a token's aggregate and the target's final state (not in the
            paper). It trains LSA directly, before CA has learned to read its output.
        divergence: "forward_kl" (the paper), "negative_log_acceptance" or "hybrid"; see
            `divergence`.
    """

    feature: float = 1.0
    kl: float = 0.1
    summary: float = 0.0
    divergence: Divergence = "forward_kl"

    def __post_init__(self) -> None:
        for name in ("feature", "kl", "summary"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"loss.{name} must be 0 or more, got {getattr(self, name)}.")
        if self.divergence not in _GRADIENTS:
            known = ", ".join(_GRADIENTS)
            raise InputError(f"loss.divergence must be one of {known}, got {self.divergence}.")


@dataclass(frozen=True)
class LossSums:
    """Sums over queries, which can be added up over batches and processes.

    Attributes:
        feature: smooth-L1 between states, mean over E.
        kl: divergence between the target's distribution and the drafter's.
        hits: number of queries whose most likely draft is the target's most likely token.
        count: number of queries.
    """

    total: float = 0.0
    feature: float = 0.0
    kl: float = 0.0
    hits: float = 0.0
    count: float = 0.0


@dataclass(frozen=True)
class ExitStates:
    """States of one exit for the queries with loss, and the target's states.

    Attributes:
        drafted_ME: the drafter's states before the LM head, with gradients.
        target_ME: final states of the target, after its final norm.
        logits: the LM head, for both.
        inner: for N > 0, drafted and target states before the last N layers, (M, E) each.
        relative: divide states by the target state's root mean square; set for exits with adapters.
    """

    drafted_ME: Tensor
    target_ME: Tensor
    logits: LogitsFunction
    inner: tuple[Tensor, Tensor] | None = None
    relative: bool = False


def feature_loss(drafted_ME: Tensor, target_ME: Tensor, *, relative: bool = False) -> Tensor:
    """Smooth-L1 (beta 1), mean over E, summed over queries. Source: the paper, section 4.4.

    Args:
        relative: divide both by the root mean square of each target state first.
    """
    if relative:
        size_M1 = target_ME.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6)
        drafted_ME, target_ME = drafted_ME / size_M1, target_ME / size_M1
    return F.smooth_l1_loss(drafted_ME, target_ME, reduction="none").mean(-1).sum()


def summary_loss(aggregate_TE: Tensor, target_TE: Tensor) -> Tensor:
    """Smooth-L1 (beta 1), mean over E, summed over tokens; see `LossWeights.summary`.

    Args:
        aggregate_TE: LSA's output, (T, E).
        target_TE: the target's final states of these tokens, (T, E).
    """
    return F.smooth_l1_loss(aggregate_TE, target_TE, reduction="sum") / target_TE.shape[-1]


def divergence(drafted_MV: Tensor, target_MV: Tensor, kind: Divergence = "forward_kl") -> Tensor:
    """Divergence between target p and drafter q of each query, from logits: (M,).

    A sampled draft is accepted with probability a = sum min(p, q).

        forward_kl                KL(p || q)
        negative_log_acceptance   -log a; a small a does not make its gradient vanish
        hybrid                    w KL(p || q) + (1 - w) (1 - a), w = exp(-3 a) without gradient

    Source: the last two are the LK losses of arXiv 2602.23881, w for each query by itself.
    """
    return cast(Tensor, _Divergence.apply(drafted_MV, target_MV, kind))


class _Divergence(torch.autograd.Function):
    """Computes value and gradient with respect to q's logits together, to save memory.

    With r_i the derivative of the divergence by q_i, the logits' gradient is q (r - sum_j q_j r_j).
    """

    @staticmethod
    def forward(ctx: Any, drafted_MV: Tensor, target_MV: Tensor, kind: Divergence) -> Tensor:
        log_p, log_q = target_MV.log_softmax(-1), drafted_MV.log_softmax(-1)
        value_M, gradient = _GRADIENTS[kind](log_p, log_q)
        ctx.save_for_backward(gradient)
        return value_M

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outputs[0][:, None], None, None


def _probabilities(log_p: Tensor) -> Tensor:
    """Clamp before exp: subnormal numbers are ten times slower on a CPU."""
    return log_p.clamp(min=MIN_LOG_PROBABILITY).exp_()


def _forward_kl(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    p = _probabilities(log_p)
    value_M = log_p.sub_(log_q).mul_(p).sum(-1)
    return value_M, log_q.clamp_(min=MIN_LOG_PROBABILITY).exp_().sub_(p)


def _total_variation(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """1 - a, which is half of sum |p - q|."""
    q = log_q.clamp_(min=MIN_LOG_PROBABILITY).exp_()
    difference = q - log_p.clamp_(min=MIN_LOG_PROBABILITY).exp_()
    value_M, sign = 0.5 * difference.abs().sum(-1), difference.sign_().mul_(0.5)
    return value_M, sign.sub_((q * sign).sum(-1, keepdim=True)).mul_(q)


def _negative_log_acceptance(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    variation_M, gradient = _total_variation(log_p, log_q)
    acceptance_M = (1 - variation_M).clamp_(min=MIN_ACCEPTANCE)
    return -acceptance_M.log(), gradient.div_(acceptance_M[:, None])


def _hybrid(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    variation_M, of_variation = _total_variation(log_p.clone(), log_q.clone())
    kl_M, of_kl = _forward_kl(log_p, log_q)
    share_M = (-HYBRID_DECAY * (1 - variation_M)).exp_()
    return torch.lerp(variation_M, kl_M, share_M), of_variation.lerp_(of_kl, share_M[:, None])


_GRADIENTS = {
    "forward_kl": _forward_kl,
    "negative_log_acceptance": _negative_log_acceptance,
    "hybrid": _hybrid,
}


def exit_loss(
    states: ExitStates, weights: LossWeights, *, scale: float, chunk: int = MAX_CHUNK
) -> tuple[Tensor, Tensor]:
    """The loss of one exit, holding `chunk` x V logits at a time.

    Args:
        scale: factor of the summed loss, which makes the step's gradient that of a mean (over
            queries and exits).
        chunk: number of queries whose logits are in memory at once.

    Returns:
        A scalar to backpropagate, whose gradient (not value) is that of `scale` times the loss
        summed over queries, and the fields of `LossSums`, (5,) on the states' device: reading them
        waits for a GPU.
    """
    leaf_ME = states.drafted_ME.detach().requires_grad_()
    share = 0.5 if states.inner is not None else 1.0
    sums = torch.zeros(5, device=leaf_ME.device)
    for start in range(0, max(1, len(leaf_ME)), chunk):
        part = slice(start, start + chunk)
        drafted, target = leaf_ME[part], states.target_ME[part]
        feature, kl, hits = _terms(drafted, target, states, weights)
        total = weights.feature * share * feature + weights.kl * kl
        (scale * total).backward()
        sums[:4] += torch.stack((total, share * feature, kl, hits)).detach()
    assert leaf_ME.grad is not None
    proxy = (states.drafted_ME * leaf_ME.grad).sum()
    if states.inner is not None:
        inner = share * feature_loss(*states.inner, relative=states.relative)
        proxy = proxy + scale * weights.feature * inner
        sums[0] += weights.feature * inner.detach()
        sums[1] += inner.detach()
    sums[4] += len(leaf_ME)
    return proxy, sums


def _terms(
    drafted_ME: Tensor, target_ME: Tensor, states: ExitStates, weights: LossWeights
) -> tuple[Tensor, Tensor, Tensor]:
    """Feature loss, divergence and hits, each summed over queries."""
    with torch.no_grad():
        target_MV = states.logits(target_ME)
    drafted_MV = states.logits(drafted_ME)
    feature = feature_loss(drafted_ME, target_ME, relative=states.relative)
    # argmax is three times slower on a CPU.
    hits = (drafted_MV.max(-1).indices == target_MV.max(-1).indices).sum().float()
    return feature, divergence(drafted_MV, target_MV, weights.divergence).sum(), hits


def mean_over_exits(sums: Sequence[Tensor]) -> Tensor:
    """Mean of the sums of `exit_loss` over exits, (5,) float64; hits are those of the first."""
    stacked = torch.stack(list(sums)).double()
    mean = stacked.mean(0)
    mean[3] = stacked[0, 3]
    return mean
