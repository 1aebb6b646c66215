"""Dtypes, by PyTorch's names."""

from typing import Literal, get_args

TargetDtype = Literal["float32", "bfloat16", "float16"]
"""Of a target's weights and computations. Layouts are for some of them (`can_pack` in
`moaspec.backends.linear_backends`), and so are kernels (`Matrix.can_hold` in
`moaspec.backends.cpu.matrix`); PyTorch computes the others."""
TARGET_DTYPES: tuple[TargetDtype, ...] = get_args(TargetDtype)
STORED_DTYPES = tuple(dict.fromkeys((*TARGET_DTYPES, "float64")))
"""Of the weights in a drafter's checkpoint."""
