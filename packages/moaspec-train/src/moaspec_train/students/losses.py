"""Distillation losses.

Legend: M queries with loss, T tokens of all texts, E hidden size, V draft vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from moaspec.backends.cpu.distillation import can_distil, forward_kl
from moaspec_core.errors import InputError

LogitsFunction = Callable[[Tensor], Tensor]
"""(M, E) states -> (M, V) logits over the draft vocabulary, in float32 or the head's dtype."""
Divergence = Literal["forward_kl", "hybrid"]
MAX_CHUNK = 512  # queries whose logits are in memory at once: at most, and on a GPU at least
MIN_LOG_PROBABILITY = -80.0  # lower bound of log-probabilities: e^-80 adds nothing to a float32 sum
HYBRID_DECAY = 3.0
"""Decay of KL's share in "hybrid" with the acceptance probability (eta of arXiv 2602.23881)."""
MAX_CPU_LOGITS = 2**22
"""Logits in memory at once on a CPU: 16 MB stay in its caches and are reused by the allocator."""
MAX_GPU_LOGITS = 2**27
"""And on a GPU: large products, 0.5 GB in float32."""


def logit_chunk_size(num_logits: int, device: torch.device) -> int:
    """Number of queries whose logits are computed at once."""
    if device.type != "cpu":
        return max(MAX_CHUNK, MAX_GPU_LOGITS // num_logits)
    return max(32, min(MAX_CHUNK, MAX_CPU_LOGITS // num_logits))


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """Weights of the terms of the loss.

    Attributes:
        feature: smooth-L1 between states of drafter and target (the paper: 1.0).
        kl: divergence between their distributions (the paper: 0.1).
        summary: smooth-L1 between a token's aggregate and the target's final state (not in the
            paper). It trains LSA directly, before CA has learned to read its output.
        divergence: "forward_kl" (the paper) or "hybrid"; see `divergence`.
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
        draftable_M: bool, queries whose next token the draft vocabulary has; None for all. Over a
            trimmed vocabulary the target's distribution is renormalised, and where it has lost its
            best token it would teach a draft that is never accepted. So the others have no
            divergence. For a text that the target has sampled, this weighs each query by the
            probability that is left, on average.
    """

    drafted_ME: Tensor
    target_ME: Tensor
    logits: LogitsFunction
    inner: tuple[Tensor, Tensor] | None = None
    relative: bool = False
    draftable_M: Tensor | None = None


Distil = Callable[[Tensor, Tensor, Tensor, Divergence], tuple[Tensor, Tensor, Tensor]]


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


def divergence(
    drafted_MV: Tensor, target_MV: Tensor, kind: Divergence = "forward_kl"
) -> tuple[Tensor, Tensor]:
    """Divergence between target p and drafter q of each query, and its gradient by q's logits.

    A sampled draft is accepted with probability a = sum min(p, q).

        forward_kl                KL(p || q)
        hybrid                    w KL(p || q) + (1 - w) (1 - a), w = exp(-3 a) without gradient

    With r_i the derivative of the divergence by q_i, the logits' gradient is q (r - sum_j q_j r_j).

    Args:
        drafted_MV, target_MV: logits.

    Returns:
        (M,) and (M, V), float32.

    Source: hybrid is an LK loss of arXiv 2602.23881, w for each query by itself.
    """
    log_p, log_q = (one.float().log_softmax(-1) for one in (target_MV, drafted_MV))
    return _GRADIENTS[kind](log_p, log_q)


def distil(
    drafted_MV: Tensor, target_MV: Tensor, factor_M: Tensor, kind: Divergence
) -> tuple[Tensor, Tensor, Tensor]:
    """`divergence` and its gradient, and where both have the same most likely token.

    Args:
        drafted_MV: logits.
        target_MV: logits of the same dtype.
        factor_M: float32, of each query's gradient.

    Returns:
        The divergences, (M,) float32; (M,) bool; the gradient by the drafter's logits, in their
        dtype.
    """
    # argmax is three times slower on a CPU.
    hit_M = drafted_MV.max(-1).indices == target_MV.max(-1).indices
    value_M, gradient_MV = divergence(drafted_MV, target_MV, kind)
    return value_M, hit_M, (gradient_MV * factor_M[:, None]).to(drafted_MV.dtype)


def fast_distil(device: torch.device, compiled: Callable[..., Any] = torch.compile) -> Distil:
    """`distil` with few passes over the logits: compiled on a GPU, by a kernel on a CPU.

    The kernel overwrites the target's logits.

    Args:
        compiled: compiles a function; as `torch.compile`.
    """
    if device.type == "cuda":
        function: Distil = compiled(distil, dynamic=True)  # the last chunk has fewer queries
        return function

    def by_kernel(
        drafted_MV: Tensor, target_MV: Tensor, factor_M: Tensor, kind: Divergence
    ) -> tuple[Tensor, Tensor, Tensor]:
        if kind == "forward_kl" and can_distil(drafted_MV):
            return forward_kl(target_MV, drafted_MV, factor_M)
        return distil(drafted_MV, target_MV, factor_M, kind)

    return by_kernel


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


def _hybrid(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    variation_M, of_variation = _total_variation(log_p.clone(), log_q.clone())
    kl_M, of_kl = _forward_kl(log_p, log_q)
    share_M = (-HYBRID_DECAY * (1 - variation_M)).exp_()
    return torch.lerp(variation_M, kl_M, share_M), of_variation.lerp_(of_kl, share_M[:, None])


_GRADIENTS = {
    "forward_kl": _forward_kl,
    "hybrid": _hybrid,
}


def exit_loss(
    states: ExitStates,
    weights: LossWeights,
    *,
    scale: float,
    chunk: int = MAX_CHUNK,
    distil: Distil = distil,
) -> tuple[Tensor, Tensor]:
    """The loss of one exit, holding `chunk` x V logits at a time.

    Args:
        scale: factor of the summed loss, which makes the step's gradient that of a mean (over
            queries and exits).
        chunk: number of queries whose logits are in memory at once.
        distil: as the function of this name.

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
        feature = share * feature_loss(
            leaf_ME[part], states.target_ME[part], relative=states.relative
        )
        (scale * weights.feature * feature).backward()
        kl, hits = _distil_chunk(leaf_ME[part], part, states, weights, scale=scale, distil=distil)
        feature = feature.detach()
        total = weights.feature * feature + weights.kl * kl
        sums[:4] += torch.stack((total, feature, kl, hits))
    assert leaf_ME.grad is not None
    proxy = (states.drafted_ME * leaf_ME.grad).sum()
    if states.inner is not None:
        inner = share * feature_loss(*states.inner, relative=states.relative)
        proxy = proxy + scale * weights.feature * inner
        sums[0] += weights.feature * inner.detach()
        sums[1] += inner.detach()
    sums[4] += len(leaf_ME)
    return proxy, sums


def _distil_chunk(
    drafted_ME: Tensor,
    part: slice,
    states: ExitStates,
    weights: LossWeights,
    *,
    scale: float,
    distil: Distil,
) -> tuple[Tensor, Tensor]:
    """Backpropagate the divergence to the drafter's states; its sum over queries, and the hits."""
    drafted_MV = states.logits(drafted_ME)
    with torch.no_grad():
        target_MV = states.logits(states.target_ME[part])
        counted_M = drafted_MV.new_ones(len(drafted_ME), dtype=torch.float32)
        if states.draftable_M is not None:
            counted_M = states.draftable_M[part].float()
        factor_M = counted_M * (scale * weights.kl)
        value_M, hit_M, gradient_MV = distil(drafted_MV, target_MV, factor_M, weights.divergence)
    drafted_MV.backward(gradient_MV)
    return (value_M * counted_M).sum(), (hit_M * counted_M).sum()


def mean_over_exits(sums: Sequence[Tensor]) -> Tensor:
    """Mean of the sums of `exit_loss` over exits, (5,) float64; hits are those of the first."""
    stacked = torch.stack(list(sums)).double()
    mean = stacked.mean(0)
    mean[3] = stacked[0, 3]
    return mean
