"""What training does otherwise on a GPU: rounding of products, and compiled layers."""

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moaspec.model.moa import TargetEncoder

CHUNK = 2048
"""Tokens whose layers the compiled LSA reads at once: one shape, so it is compiled once."""


@contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """On a GPU, let float32 products round their factors to TF32."""
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def compile_mean(
    encoder: TargetEncoder, compiled: Callable[..., Any] = torch.compile
) -> Callable[[Tensor], Tensor]:
    """`TargetEncoder.mean_over_layers` by one compiled function, for passes with gradients.

    Args:
        compiled: compiles a function; as `torch.compile`.
    """
    layer_mean = compiled(encoder.layer_mean, dynamic=False)

    def mean(kv_BTLK: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or encoder.last_layer_only:
            return TargetEncoder.mean_over_layers(encoder, kv_BTLK)
        flat_MLK = kv_BTLK.flatten(0, 1).to(encoder.memory_norm.weight.dtype)
        padded = F.pad(flat_MLK, (0, 0, 0, 0, 0, -len(flat_MLK) % CHUNK))
        means = [layer_mean(chunk) for chunk in padded.split(CHUNK)]
        return torch.cat(means)[: len(flat_MLK)].unflatten(0, kv_BTLK.shape[:2])

    return mean


def peak_memory(device: torch.device) -> int:
    """Bytes: of a GPU's memory the most that PyTorch has had, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
