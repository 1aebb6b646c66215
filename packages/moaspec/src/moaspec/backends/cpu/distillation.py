"""The divergence of distillation and its gradient in one call.

Legend: M queries, V draft vocabulary.
"""

import torch
from torch import Tensor

from moaspec.backends.cpu.build import call, library, why_not


def can_distil(logits_MV: Tensor) -> bool:
    """Whether `forward_kl` supports these logits."""
    known = logits_MV.dtype in (torch.bfloat16, torch.float32)
    return known and logits_MV.device.type == "cpu" and logits_MV.numel() > 0 and why_not() is None


def forward_kl(
    target_MV: Tensor, drafted_MV: Tensor, factor_M: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """KL(p || q) of target p and drafter q, from logits of one dtype.

    Args:
        target_MV: is overwritten.
        factor_M: float32, of each query's gradient.

    Returns:
        The divergences, (M,) float32; whether the most likely tokens are the same, (M,) bool; and
        `factor_M` times the gradient by q's logits, (M, V) in their dtype, in the memory of
        `target_MV`.
    """
    assert target_MV.dtype == drafted_MV.dtype
    assert target_MV.is_contiguous()
    drafted_MV, factor_M = drafted_MV.contiguous(), factor_M.contiguous()
    rows, size = target_MV.shape
    value_M, hit_M = torch.empty(rows), torch.empty(rows, dtype=torch.bool)
    wide = target_MV.dtype == torch.float32
    kernel = library().moaspec_forward_kl
    call(kernel, target_MV, drafted_MV, int(wide), rows, size, factor_M, value_M, hit_M)
    return value_M, hit_M, target_MV
