"""Positional noise of many tokens at once."""

from __future__ import annotations

from ctypes import c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from moaspec.kernels.build import library, why_not


def can_draw(*arguments: Tensor) -> bool:
    """Whether `draw_bits` takes these."""
    return why_not() is None and all(
        x.device.type == "cpu" and x.dtype == torch.int64 for x in arguments
    )


def draw_bits(*arguments: Tensor) -> Tensor:
    """The bits that `moaspec.decode.noise` makes its numbers of, int64.

    Args:
        arguments: seed, choice, position and token id, int64 tensors that broadcast.
    """
    whole = [x.contiguous() for x in torch.broadcast_tensors(*arguments)]
    out = torch.empty_like(whole[0])
    library().moaspec_noise(
        *(c_void_p(x.data_ptr()) for x in whole),
        c_int64(out.numel()),
        c_void_p(out.data_ptr()),
        c_int32(torch.get_num_threads()),
    )
    return out
