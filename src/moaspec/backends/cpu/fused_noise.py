"""Positional noise of many tokens at once."""

from __future__ import annotations

from ctypes import c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from moaspec.backends.cpu.build import library, why_not


def can_draw(*arguments: Tensor) -> bool:
    """Whether `draw_bits` takes these."""
    return why_not() is None and all(
        x.device.type == "cpu" and x.dtype == torch.int64 for x in arguments
    )


def draw_bits(seed: Tensor, choice: Tensor, position: Tensor, token_id: Tensor) -> Tensor:
    """The bits that `moaspec.sampling.noise` makes its numbers of, int64.

    Args:
        seed: int64; the arguments broadcast.
        choice: int64.
        position: int64.
        token_id: int64.
    """
    facts = (seed, choice, position)
    if not seed.shape == choice.shape == position.shape:  # which takes longer to find out inside
        facts = torch.broadcast_tensors(*facts)
    places = torch.stack(facts, dim=-1)
    shape = torch.broadcast_shapes(places.shape[:-1], token_id.shape)
    shared = token_id.ndim == 1 and (places.ndim == 1 or places.shape[-2] == 1)
    if not shared:  # tokens of its own for each place: one each
        places = places.expand(*shape, 3).contiguous()
        token_id = token_id.expand(shape)
    token_id = token_id.contiguous()
    out = torch.empty(shape, dtype=torch.int64)
    library().moaspec_noise(
        c_void_p(places.data_ptr()),
        c_int64(places.numel() // 3),
        c_void_p(token_id.data_ptr()),
        c_int64(not shared),
        c_int64(token_id.numel() if shared else 1),
        c_void_p(out.data_ptr()),
        c_int32(torch.get_num_threads()),
    )
    return out
