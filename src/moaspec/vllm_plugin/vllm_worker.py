"""vLLM's worker for this platform, extended to connect the custom proposer to its model runner."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform

from moaspec.vllm_plugin.custom_proposer import CustomProposer

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class MoAWorker(PlatformWorker):
    """The stock worker, which also starts the proposer and lets it finish each step."""

    @property
    def _proposer(self) -> CustomProposer | None:
        proposer = getattr(self.model_runner, "drafter", None)
        return proposer if isinstance(proposer, CustomProposer) else None

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_from_config(*args, **kwargs)
        if self._proposer is not None:
            self._proposer.start(self.model_runner)

    @torch.inference_mode()
    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample, verify and draft, then let the proposer finish the step."""
        output = super().sample_tokens(*args, **kwargs)
        if self._proposer is not None:
            self._proposer.finish_step()
        return output
