"""A decoder layer's arithmetic in C++, and noise, for CPUs with AVX512-BF16 or AVX2; see `cpu.cpp`.

It is compiled at its first use and kept. Where that cannot be, `why_not` says why, and callers go
on with PyTorch's own operations.
"""

from moaspec.kernels.attention import MOST_QUERIES, attend, can_attend
from moaspec.kernels.build import instructions, must_compile, unpacks, why_not
from moaspec.kernels.codes import can_be_moment
from moaspec.kernels.drafter import Coupling, FusedEncoder, FusedExit, Grown, TreePart, draft_tree
from moaspec.kernels.laws import Law, can_choose, choose
from moaspec.kernels.layers import FusedLayer, FusedNorm, FusedStack, Slots
from moaspec.kernels.matrix import Matrix
from moaspec.kernels.noise import can_draw, draw_bits

__all__ = [
    "MOST_QUERIES",
    "Coupling",
    "FusedEncoder",
    "FusedExit",
    "FusedLayer",
    "FusedNorm",
    "FusedStack",
    "Grown",
    "Law",
    "Matrix",
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
