"""Choosing tokens by seeded sampling, in one call.

Legend: N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from moaspec.backends.cpu.build import library, why_not
from moaspec.backends.cpu.structures import SamplerFacts


class SamplerParams(NamedTuple):
    """How one token is chosen, see `moaspec.sampling.choose`.

    Attributes:
        temperature: above 0.
        top_k: 0 for all.
        top_p: 1 for all.
        min_p: 0 for all.
        seed: of the noise, as an int64; the others likewise.
        choice: which of several continuations.
        position: of the token.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    choice: int
    position: int


def can_choose(logits_NV: Tensor) -> bool:
    """Whether `choose` takes these."""
    cpu = logits_NV.device.type == "cpu" and logits_NV.dtype == torch.float32
    return cpu and logits_NV.shape[1] > 0 and why_not() is None


def choose(logits_NV: Tensor, samplers: Sequence[SamplerParams]) -> list[int]:
    """The token of the largest logit / temperature + noise, among those that the filters leave.

    Args:
        logits_NV: float32, on the CPU.
        samplers: one per node.
    """
    assert len(samplers) == len(logits_NV)
    logits_NV = logits_NV.contiguous()
    tokens = (c_int64 * len(samplers))()
    library().moaspec_choose(
        c_void_p(logits_NV.data_ptr()),
        c_int64(len(samplers)),
        c_int64(logits_NV.shape[1]),
        (SamplerFacts * len(samplers))(*(SamplerFacts(*one) for one in samplers)),
        tokens,
        c_int32(torch.get_num_threads()),
    )
    return list(tokens)
