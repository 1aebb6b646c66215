"""A Triton kernel that reads tokens from the caches of all target layers in one launch.

`TRITON_INTERPRET=1`, set before the first import of Triton, runs it on a CPU.

Legend: N tokens, L layers, O slots of a block, X elements of a token in a layer.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

WIDTH = 1024  # elements that a program copies


@triton.jit  # type: ignore[untyped-decorator]
def _gather(  # noqa: PLR0917 - a kernel
    first: Any,
    offsets_ptr: Any,
    slots_ptr: Any,
    places_ptr: Any,
    out_ptr: Any,
    block_stride: Any,
    block_size: Any,
    num_elements: Any,
    width: tl.constexpr,
) -> None:
    token, layer = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    block = slot // block_size
    element = tl.program_id(2) * width + tl.arange(0, width)
    inside = element < num_elements
    place = tl.load(places_ptr + (slot % block_size) * num_elements + element, mask=inside, other=0)
    source = tl.load(offsets_ptr + layer) + block * block_stride + place.to(tl.int64)
    target = (token.to(tl.int64) * tl.num_programs(1) + layer) * num_elements + element
    tl.store(out_ptr + target, tl.load(first + source, mask=inside), mask=inside)


def gather(
    first: Tensor, offsets_L: Tensor, slots_N: Tensor, places_OX: Tensor, block_stride: int
) -> Tensor:
    """Read tokens of all layers, (N, L, X).

    Args:
        first: the cache of the first layer.
        offsets_L: elements from its first element to that of each layer, int64.
        slots_N: cache slots of the tokens, int64.
        places_OX: places of each slot's elements in block 0, int32.
        block_stride: elements from one block to the next.
    """
    num_elements = places_OX.shape[1]
    out_NLX = first.new_empty(len(slots_N), len(offsets_L), num_elements)
    if len(slots_N):
        grid = (len(slots_N), len(offsets_L), triton.cdiv(num_elements, WIDTH))
        _gather[grid](
            first,
            offsets_L,
            slots_N,
            places_OX,
            out_NLX,
            block_stride,
            len(places_OX),
            num_elements,
            width=WIDTH,
        )
    return out_NLX
