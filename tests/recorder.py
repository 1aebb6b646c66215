"""A stand-in for CUDA graphs on a CPU: what was captured runs again on the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moaspec.backends.cuda_graphs import CudaGraph, PassGraphs

aten = torch.ops.aten
HOST = {aten._local_scalar_dense.default, aten.nonzero.default, aten.lift_fresh.default}
"""Operations that wait for a device or bring numbers to it, which no CUDA graph can hold."""


class _NothingOfTheHost(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOST:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        return func(*args, **(kwargs or {}))


class Recorder(CudaGraph):
    """Records and replays on a CPU."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def capture(self, run: Callable[[], Tensor]) -> Tensor:
        """Run it under a graph's restrictions; its result is worth nothing until `replay`."""
        self._log.append("capture")
        self._run = run
        with _NothingOfTheHost():
            self._result = run()
        return self._result.fill_(torch.nan)

    def replay(self) -> None:
        """Run it once more."""
        self._log.append("replay")
        self._result.copy_(self._run())


def recorders() -> tuple[PassGraphs, list[str]]:
    """For a target's `graphs`, and what they will have done."""
    log: list[str] = []
    return PassGraphs(lambda: Recorder(log)), log
