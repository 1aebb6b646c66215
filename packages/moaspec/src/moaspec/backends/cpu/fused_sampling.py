"""Seeded sampling in one call: the noise of many tokens, and the choice of tokens.

Legend: N nodes, V vocabulary.
"""

from collections.abc import Sequence
from ctypes import c_int64

import torch
from torch import Tensor

from moaspec.backends.cpu.build import call, library, why_not
from moaspec.backends.cpu.structures import SamplerStruct
from moaspec.sampling.kernels import SamplerParams


def can_choose(logits_NV: Tensor) -> bool:
    """Whether `choose` supports these logits."""
    cpu = logits_NV.device.type == "cpu" and logits_NV.dtype == torch.float32
    return cpu and logits_NV.shape[1] > 0 and why_not() is None


def choose(logits_NV: Tensor, samplers: Sequence[SamplerParams]) -> list[int]:
    """The token of the largest logit / temperature + noise, after the filters.

    Args:
        logits_NV: float32, on the CPU.
    """
    assert len(samplers) == len(logits_NV)
    logits_NV = logits_NV.contiguous()
    tokens = (c_int64 * len(samplers))()
    struct = (SamplerStruct * len(samplers))(*(SamplerStruct(*one) for one in samplers))
    call(library().moaspec_choose, logits_NV, *logits_NV.shape, struct, tokens)
    return list(tokens)


def can_draw(*arguments: Tensor) -> bool:
    """Whether `draw_bits` supports these arguments."""
    return why_not() is None and all(
        x.device.type == "cpu" and x.dtype == torch.int64 for x in arguments
    )


def draw_bits(seed: Tensor, choice: Tensor, position: Tensor, token_id: Tensor) -> Tensor:
    """The random bits of `moaspec.sampling.noise`; arguments int64, broadcast."""
    struct = (seed, choice, position)
    if not seed.shape == choice.shape == position.shape:  # broadcast_tensors alone takes longer
        struct = torch.broadcast_tensors(*struct)
    places = torch.stack(struct, dim=-1)
    shape = torch.broadcast_shapes(places.shape[:-1], token_id.shape)
    shared = token_id.ndim == 1 and (places.ndim == 1 or places.shape[-2] == 1)
    if not shared:  # a place for each token
        places = places.expand(*shape, 3).contiguous()
        token_id = token_id.expand(shape)
    token_id = token_id.contiguous()
    out = torch.empty(shape, dtype=torch.int64)
    num_tokens = token_id.numel() if shared else 1
    noise = library().moaspec_noise
    call(noise, places, places.numel() // 3, token_id, not shared, num_tokens, out)
    return out
