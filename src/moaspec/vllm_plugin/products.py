"""Products with frozen weights, laid out for this CPU where that helps."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moaspec.target.forms import can_pack
from moaspec.target.packing import PackedLinear

Product = Callable[[Tensor], Tensor]


def product(weight: Tensor, bias: Tensor | None = None, *, drafts: bool = False) -> Product:
    """What multiplies its input by a transposed weight and adds the bias.

    Args:
        weight: (outputs, inputs).
        bias: (outputs,).
        drafts: what it computes is only proposed, so the weight may be rounded.
    """
    if not can_pack(weight.dtype, weight.device):
        return lambda x: F.linear(x, weight, bias)
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return PackedLinear(layer, drafts=drafts).product()
