"""Parts of a step as CUDA graphs, captured and replayed by vLLM's own wrapper.

Started one by one, the operations of a draft step keep the host longer than they keep the GPU. A
graph starts them all. It repeats the operations of its capture on the same memory: what differs
between steps is in `StepInputs`, and requests or tokens are padded to a size that was captured.

Without a GPU, or with vLLM's graphs off, nothing is captured and parts run as they are.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from vllm.compilation.cuda_graph import CUDAGraphOptions, CUDAGraphWrapper
from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import graph_capture
from vllm.forward_context import BatchDescriptor, set_forward_context

Part = Callable[[int, int, int], Tensor]
"""(size, depth, length of the longest text) -> result, in memory that the caller owns."""


class StepGraphs:
    """One part of a step, with a CUDA graph for each size that was captured.

    Args:
        part: what to run. It waits for nothing and reads nothing from the host but its arguments.
        config: vLLM's.
        longest: length of the longest text that the graphs are for.
    """

    def __init__(self, part: Part, config: Any, *, longest: int) -> None:
        self._part, self._config, self._longest = part, config, longest
        self._wrapper: CUDAGraphWrapper | None = None
        self._sizes = dict[int, list[int]]()

    def padded(self, size: int, depth: int) -> int:
        """The smallest captured size that is enough for a size above 0; 0 where there is none."""
        sizes = self._sizes.get(depth, [])
        place = bisect_left(sizes, size)
        return sizes[place] if size and place < len(sizes) else 0

    def __call__(self, size: int, depth: int, longest: int) -> Tensor:
        """Run the part on the inputs that were sent, by the graph of this size if there is one."""
        if size not in self._sizes.get(depth, ()):
            return self._part(size, depth, longest)
        return self._replay(size, depth)

    def _replay(self, size: int, depth: int) -> Tensor:
        key = BatchDescriptor(num_tokens=size * (1 + depth), num_reqs=size, uniform=True)
        assert self._wrapper is not None
        with set_forward_context(
            None,
            self._config,
            cudagraph_runtime_mode=CUDAGraphMode.FULL,
            batch_descriptor=key,
        ):
            found: Tensor = self._wrapper(size, depth, self._longest)
            return found

    def capture(self, size: int, depth: int) -> None:
        """Capture the graph of a size, inside `capturing`; the inputs of pads have been sent.

        Larger sizes come first, and smaller ones use their memory.
        """
        self._wrapper = self._wrapper or CUDAGraphWrapper(
            self._part,
            self._config,
            CUDAGraphMode.FULL,
            # The result is in memory of ours, which outlives the graph's.
            CUDAGraphOptions(gc_disable=True, weak_ref_output=False),
        )
        self._part(size, depth, self._longest)  # compiles kernels
        torch.accelerator.synchronize()
        self._replay(size, depth)
        insort(self._sizes.setdefault(depth, []), size)

    def clear(self) -> None:
        """Run as if nothing had been captured."""
        self._wrapper = None
        self._sizes.clear()

    @property
    def number(self) -> int:
        """Graphs that were captured."""
        return sum(map(len, self._sizes.values()))


@contextmanager
def capturing(runner: Any) -> Iterator[None]:
    """Let graphs be captured, as vLLM does around its own captures."""
    set_cudagraph_capturing_enabled(True)
    try:
        with runner._freeze_gc(), graph_capture(device=runner.device):
            yield
    finally:
        set_cudagraph_capturing_enabled(False)
        torch.accelerator.synchronize()
