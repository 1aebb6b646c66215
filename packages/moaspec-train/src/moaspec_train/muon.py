"""Muon, an optimiser for matrices (kellerjordan.github.io/posts/muon, arXiv 2502.16982).

The update of a matrix is its gradient's moving average with all singular values near 1.
`torch.optim.Muon` does the same in bf16 alone, which CPUs without bf16 instructions emulate some
thirty times slower than float32.

Legend: O outputs and I inputs of a matrix.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from moaspec.backends.linear_backends import compute_dtype

MOMENTUM = 0.95
ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of the polynomial a x + b x^3 + c x^5, which takes singular values towards 1."""

BLOCKS, LEAST_BLOCK = 6, 128
"""Blocks of rows that a symmetric product is computed by, and the rows of one at least."""

UPDATE_SIZE = 0.2
"""Root mean square of an update over the learning rate: about AdamW's, so the same rate fits."""


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay."""

    def __init__(self, matrices: Iterable[nn.Parameter], *, lr: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            for weight_OI in group["params"]:
                if weight_OI.grad is not None:
                    self._update(weight_OI, group["lr"], group["weight_decay"])

    def _update(self, weight_OI: nn.Parameter, lr: float, weight_decay: float) -> None:
        gradient_OI, state = weight_OI.grad, self.state[weight_OI]
        assert gradient_OI is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient_OI)
        average_OI = state["momentum_buffer"].lerp_(gradient_OI, 1 - MOMENTUM)
        update_OI = orthogonal(gradient_OI.lerp(average_OI, MOMENTUM))
        size = UPDATE_SIZE * math.sqrt(max(weight_OI.shape))
        weight_OI.mul_(1 - lr * weight_decay).add_(update_OI, alpha=-lr * size)


def orthogonal(matrix_OI: Tensor) -> Tensor:
    """The matrix with singular values of about 0.7 to 1.2, by Newton-Schulz iterations.

    Values that are tiny beside the largest one stay below that.

    Returns:
        bf16, or float32 on a CPU without bf16 instructions.
    """
    is_cpu, is_tall = matrix_OI.device.type == "cpu", len(matrix_OI) > matrix_OI.shape[1]
    x = matrix_OI.to(compute_dtype(torch.bfloat16) if is_cpu else torch.bfloat16)
    x = x.T if is_tall else x  # products of rows are the smaller ones
    x = x / x.norm().clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        square = symmetric(x)
        x = torch.addmm(x, symmetric(square, plus=square, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def symmetric(
    x: Tensor, *, plus: Tensor | None = None, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """Compute alpha * x @ x.T + beta * plus: on a CPU half of it by blocks, then mirrored.

    Args:
        plus: symmetric; None for nothing.
    """

    def product(rows: slice, columns: slice) -> Tensor:
        if plus is None:
            return x[rows] @ x[columns].T
        return torch.addmm(plus[rows, columns], x[rows], x[columns].T, beta=beta, alpha=alpha)

    if x.device.type != "cpu" or len(x) < 2 * LEAST_BLOCK:
        return product(slice(None), slice(None))
    found, size = x.new_empty(len(x), len(x)), max(LEAST_BLOCK, -(-len(x) // BLOCKS))
    for start in range(0, len(x), size):
        rows = slice(start, start + size)
        found[rows, : start + size] = product(rows, slice(start + size))
        found[:start, rows] = found[rows, :start].T
    return found
