"""The second moment of the LM head's inputs while drafting, which quantising the head can use.

Legend: E hidden size.
"""

import numpy as np
from torch import Tensor

DAMPING = 0.01  # added to the diagonal, relative to its mean: other texts vary in other directions


def damped(moment_EE: Tensor) -> np.ndarray:
    """The moment in float64 with `DAMPING`.

    A NumPy array, because MKL's factorisations, which PyTorch calls, keep about ten megabytes.
    """
    moment = moment_EE.double().numpy()
    return moment + DAMPING * moment.diagonal().mean() * np.eye(len(moment))


def is_moment(moment_EE: Tensor) -> bool:
    """Whether a square matrix can be a mean outer product: positive definite once damped."""
    try:
        factor = np.linalg.cholesky(damped(moment_EE))
    except np.linalg.LinAlgError:
        return False
    return bool(np.isfinite(factor).all())
