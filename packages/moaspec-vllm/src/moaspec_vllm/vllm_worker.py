"""vLLM's worker for this platform, extended to connect the custom proposer to its model runner."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform

from moaspec_core.errors import ServingError
from moaspec_vllm import hooks
from moaspec_vllm.custom_proposer import CustomProposer

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class MoAWorker(PlatformWorker):
    """The stock worker, which also starts the proposer and tells it of each step."""

    @property
    def _proposer(self) -> CustomProposer | None:
        proposer = getattr(self.model_runner, "drafter", None)
        return proposer if isinstance(proposer, CustomProposer) else None

    def init_device(self) -> None:
        """Build vLLM's model runner.

        Raises:
            ServingError: this is another vLLM, or its second runner, which drafts otherwise.
        """
        hooks.require_version()  # before the proposer imports what another vLLM may lack
        if self.use_v2_model_runner:
            raise ServingError(
                "moaspec drafts in vLLM's first model runner, and this vLLM was told to take the "
                "second one. Unset VLLM_USE_V2_MODEL_RUNNER, and leave watermarks out."
            )
        super().init_device()

    def determine_available_memory(self) -> int:
        """Let vLLM's profile of memory count what the drafter's encoder needs."""
        proposer, runner = self._proposer, self.model_runner
        if proposer is None:
            return int(super().determine_available_memory())
        run = runner.profile_run

        def profile_run(*args: Any, **kwargs: Any) -> None:
            run(*args, **kwargs)
            with torch.inference_mode():
                proposer.profile()

        runner.profile_run = profile_run
        try:
            return int(super().determine_available_memory())
        finally:
            del runner.profile_run

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_from_config(*args, **kwargs)
        if self._proposer is not None:
            self._proposer.start(self.model_runner)

    def compile_or_warm_up_model(self) -> Any:
        found = super().compile_or_warm_up_model()
        if self._proposer is not None:
            with torch.inference_mode():
                self._proposer.prepare()
        return found

    def call_proposer(self, name: str, *arguments: Any) -> Any:
        """Call a method of the proposer, as the engine asks all ranks to."""
        return getattr(self._proposer, name)(*arguments)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the target, with the proposer's notes before and after."""
        proposer = self._proposer
        num_tokens = scheduler_output.total_num_scheduled_tokens
        if proposer is None or not num_tokens:
            return super().execute_model(scheduler_output, *args, **kwargs)
        proposer.begin_step(num_tokens, len(scheduler_output.num_scheduled_tokens))
        output = super().execute_model(scheduler_output, *args, **kwargs)
        proposer.note_pass()
        return output
