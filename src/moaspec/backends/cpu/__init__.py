"""Decoder layers, drafting and noise in C++, for CPUs with AVX512-BF16 or AVX2; see `cpp/`.

It is compiled at its first use and kept. Where that cannot be, `why_not` says why, and callers go
on with PyTorch's own operations.
"""

from moaspec.backends.cpu.build import instructions, must_compile, unpacks, why_not
from moaspec.backends.cpu.cpu_attention import MOST_QUERIES, attend, can_attend
from moaspec.backends.cpu.fused_choice import SamplerParams, can_choose, choose
from moaspec.backends.cpu.fused_drafting import (
    Coupling,
    FusedEncoder,
    FusedExit,
    Grown,
    TreePart,
    draft_tree,
)
from moaspec.backends.cpu.fused_layers import FusedLayer, FusedNorm, FusedStack, Slots
from moaspec.backends.cpu.fused_noise import can_draw, draw_bits
from moaspec.backends.cpu.matrix import Matrix
from moaspec.backends.cpu.quantized_weight import can_be_moment

__all__ = [
    "MOST_QUERIES",
    "Coupling",
    "FusedEncoder",
    "FusedExit",
    "FusedLayer",
    "FusedNorm",
    "FusedStack",
    "Grown",
    "Matrix",
    "SamplerParams",
    "Slots",
    "TreePart",
    "attend",
    "can_attend",
    "can_be_moment",
    "can_choose",
    "can_draw",
    "choose",
    "draft_tree",
    "draw_bits",
    "instructions",
    "must_compile",
    "unpacks",
    "why_not",
]
