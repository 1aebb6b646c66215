"""vLLM's worker for this platform, which introduces the custom class to its model runner."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform

from moaspec.vllm_plugin.custom_classes import Joined

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class MoAWorker(PlatformWorker):
    """The stock worker; what it adds runs beside vLLM's own steps."""

    @property
    def _proposer(self) -> Joined | None:
        proposer = getattr(self.model_runner, "drafter", None)
        return proposer if isinstance(proposer, Joined) else None

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        """Allocate caches, then let the custom class find its own among them."""
        super().initialize_from_config(*args, **kwargs)
        if self._proposer is not None:
            self._proposer.start(self.model_runner)

    @torch.inference_mode()
    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample, verify and draft, then encode what vLLM did not ask drafts for."""
        output = super().sample_tokens(*args, **kwargs)
        if self._proposer is not None:
            self._proposer.settle()
        return output
