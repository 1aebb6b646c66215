"""Ridge regression, for closed-form initial weights.

Legend: N sampled tokens, K inputs, E outputs.
"""

import torch
from torch import Tensor, nn

RIDGE = 1e-3  # relative to the mean square of the inputs


def ridge(x_NK: Tensor, y_NE: Tensor, strength: float = RIDGE) -> Tensor:
    """W that minimises |x W - y|^2 + penalty |W|^2, (K, E).

    Args:
        strength: the penalty, relative to the sum of squares of an input.
    """
    x, y = x_NK.double(), y_NE.double()
    gram = x.T @ x
    gram += (
        strength * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype).to(gram.device)
    )
    return torch.linalg.solve(gram, x.T @ y).to(x_NK.dtype)


def fit_linear(linear: nn.Linear, inputs_NK: Tensor, outputs_NE: Tensor) -> None:
    """Set a layer with bias to the ridge regression of outputs on inputs."""
    input_mean, output_mean = inputs_NK.mean(0), outputs_NE.mean(0)
    weight_EK = ridge(inputs_NK - input_mean, outputs_NE - output_mean).T
    linear.weight.copy_(weight_EK)
    linear.bias.copy_(output_mean - weight_EK @ input_mean)
