"""Matrices of files in eight bits: int8 rows, and each row's scale under another name.

Legend: R rows, I inputs.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from moaspec_core.errors import CorruptCheckpointError

SCALE = ".row_scale"  # what the name of a quantised weight's scales ends with
LARGEST = 127
"""The largest number of a row becomes this; -128 stays unused, so that signs are symmetric."""


def quantise(weight_RI: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest eight-bit numbers, (R, I) int8, and each row's scale, (R,) float32.

    No number is off by more than half of its row's scale.
    """
    scale_R = weight_RI.float().abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny) / LARGEST
    return (weight_RI.float() / scale_R[:, None]).round().to(torch.int8), scale_R


def quantised_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """These tensors with every matrix in eight bits, and its scales beside it."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and tensor.is_floating_point():
            found[name], found[name + SCALE] = quantise(tensor)
        else:
            found[name] = tensor
    return found


def widened_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """These tensors with every matrix of eight bits in bf16, without scales.

    Raises:
        CorruptCheckpointError: a scale without its rows, or of another size.
    """
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(SCALE)}
    for name in tensors.keys() - found.keys():
        rows_RI, scale_R = found.get(name.removesuffix(SCALE)), tensors[name]
        if (
            rows_RI is None
            or rows_RI.dtype != torch.int8
            or rows_RI.ndim != 2
            or not scale_R.is_floating_point()
            or scale_R.shape != rows_RI.shape[:1]
        ):
            raise CorruptCheckpointError(
                f"Tensor {name!r} has no int8 matrix of {len(scale_R)} rows beside it."
            )
        wide_RI = rows_RI.float() * scale_R.float()[:, None]
        found[name.removesuffix(SCALE)] = wide_RI.to(torch.bfloat16)
    return found
