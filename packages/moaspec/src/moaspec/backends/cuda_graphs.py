"""CUDA graphs of passes, one for each shape.

A pass over a few tokens has dozens of small operations a layer. Launching them one by one from
Python takes longer than the GPU needs to run them; a graph is launched as a whole. Its tensors keep
their addresses, so:

- The inputs that differ between passes of one shape are copied into the graph's tensors first:
  states, rotary embeddings, masks and the cache slots to write (see `GraphSafeWrite`).
- Shapes are few: callers round tokens and visible slots up (`PassSizes` in `drafting/kv_cache.py`).

The first pass of a shape runs without a graph, so lazy initialisation is not captured and rare
shapes cost nothing. The second pass is captured. If capturing fails, passes run without graphs.

Legend: B rows, T tokens, E hidden size.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from threading import Lock
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from moaspec.backends.fast_layers import AttentionInputs
from moaspec.target.decoder_layers import WriteKV
from moaspec_core.support.causes import first_line
from moaspec_core.support.switches import setting

SWITCH = "MOASPEC_CUDA_GRAPHS"  # environment variable; "off" does without
MAX_GRAPHS = 64
"""Most shapes that are remembered, recorded or not; the least recently used one is dropped."""

Layers = Callable[[Tensor, Mapping[str, AttentionInputs], WriteKV], Tensor]
"""(states (B, T, E), attention_inputs by layer type, write) -> final states (B, T, E)."""
_Compute = Callable[[Sequence[Tensor]], Tensor]

log = logging.getLogger(__name__)


@runtime_checkable
class GraphSafeWrite(Protocol):
    """A KV write that can be captured in a CUDA graph and replayed with other slots."""

    def key(self) -> Hashable:
        """All that its operations depend on besides the slots."""
        ...

    def where(self) -> tuple[Tensor, ...]:
        """The slots that it writes, as tensors."""
        ...

    def at(self, places: tuple[Tensor, ...]) -> WriteKV:
        """This write, with these tensors as slots."""
        ...


class CudaGraph:
    """A recording of operations on tensors that stay where they are.

    Args:
        stream: for recording, one for all graphs: libraries keep memory for each stream.
        pool: memory of intermediate results.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream, pool: Any) -> None:
        self._device, self._stream, self._pool = device, stream, pool
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, run: Callable[[], Tensor]) -> Tensor:
        """Record what `run` does; the tensor that has its result after each `replay`."""
        # Other threads may use the device meanwhile, for their own passes.
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(
                self._graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            return run()

    def replay(self) -> None:
        with torch.cuda.device(self._device):
            self._graph.replay()


class _Recorded:
    """One shape's recording, and the tensors that it reads and writes."""

    def __init__(self, graph: CudaGraph, inputs: Sequence[Tensor], compute: _Compute) -> None:
        with torch.inference_mode(mode=False):  # who records is not all that replays
            self._inputs = [torch.empty_like(one).copy_(one) for one in inputs]
        self._graph = graph
        self._result = graph.capture(lambda: compute(self._inputs))

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._graph.replay()
        return self._result.clone()


class PassGraphs:
    """Recordings of a target's passes, by shape. `failure`: why nothing is recorded, or None."""

    def __init__(self, make: Callable[[], CudaGraph]) -> None:
        self._make, self._lock = make, Lock()
        self._graphs: OrderedDict[Hashable, _Recorded | None] = OrderedDict()
        self.failure: str | None = None

    @classmethod
    def of(cls, device: torch.device) -> PassGraphs | None:
        """The graphs of a device; None if it has no CUDA graphs, or they are switched off."""
        if device.type != "cuda" or setting(SWITCH) == "off":
            return None
        # Recordings are replayed one at a time, and results copied: they can share their memory.
        stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        return cls(lambda: CudaGraph(device, stream, pool))

    def run(
        self,
        layers: Layers,
        states_BTE: Tensor,
        attention_inputs: Mapping[str, AttentionInputs],
        write: GraphSafeWrite,
        *,
        key: Hashable,
    ) -> Tensor:
        """Run layers, by replaying a graph if there is one.

        Args:
            layers: called if there is no recording yet, and to make one.
            attention_inputs: by layer type, with masks.
            key: all other values that the operations of `layers` depend on.

        Returns:
            (B, T, E), to keep.
        """
        inputs = [states_BTE]
        for of_type in attention_inputs.values():
            assert of_type.mask is not None, "passes over a cache have masks"
            inputs += [of_type.cos_BTR, of_type.sin_BTR, of_type.mask]
        inputs += write.where()

        def compute(tensors: Sequence[Tensor]) -> Tensor:
            parts = iter(tensors)
            states = next(parts)
            own = {
                kind: AttentionInputs(cos_BTR=next(parts), sin_BTR=next(parts), mask=next(parts))
                for kind in attention_inputs
            }
            return layers(states, own, write.at(tuple(parts)))

        shapes = tuple((one.shape, one.dtype) for one in inputs)
        return self._run((key, write.key(), tuple(attention_inputs), shapes), inputs, compute)

    def _run(self, key: Hashable, inputs: Sequence[Tensor], compute: _Compute) -> Tensor:
        with self._lock:  # a recording's tensors are one pass's at a time
            recorded = self._recorded(key, inputs, compute)
            if recorded is not None:
                return recorded(inputs)
        return compute(inputs)

    def _recorded(
        self, key: Hashable, inputs: Sequence[Tensor], compute: _Compute
    ) -> _Recorded | None:
        """The recording for a shape, made when the shape occurs for the second time."""
        if self.failure is not None:
            return None
        seen = key in self._graphs
        recorded = self._graphs.pop(key, None)
        if seen and recorded is None:
            try:
                recorded = _Recorded(self._make(), inputs, compute)
            except RuntimeError as error:
                self._run_without_graphs(error)
                return None
        self._graphs[key] = recorded
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
        return recorded

    def _run_without_graphs(self, error: RuntimeError) -> None:
        self.failure = first_line(error)
        self._graphs.clear()
        log.warning(
            "Passes are not recorded as CUDA graphs, and take longer to launch: %s", self.failure
        )
