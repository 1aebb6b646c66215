"""Base of the classes that vLLM instantiates for `method: custom_class`."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from moaspec.vllm_plugin import hooks
from moaspec.vllm_plugin.capture import HeadShare, VLLMCapture, require_capturable
from moaspec.vllm_plugin.refusals import check_settings


class CustomProposer:
    """A custom class of vLLM's that `MoAWorker` connects to the model runner.

    Raises:
        ServingError: this vLLM version or one of its settings is not supported.
        UnsupportedTargetError: the target's keys and values cannot be captured.
    """

    runner_hooks: tuple[str, ...] = ()  # attributes of the model runner that the class reads

    def __init__(self, vllm_config: Any) -> None:
        hooks.require_version()
        hooks.require_modules()
        check_settings(vllm_config)
        self.vllm_config = vllm_config
        self.runner: Any = None

    def start(self, runner: Any) -> None:
        """Keep the runner with its caches; ServingError if it lacks `runner_hooks`."""
        for path in self.runner_hooks:
            hooks.require(runner, path)
        self.runner = runner

    def finish_step(self) -> None:
        """Called by the worker at the end of each step."""

    def empty_like_target(self, target: Any) -> torch.Tensor:
        dtype = self.vllm_config.model_config.dtype
        return torch.empty(0, dtype=dtype, device=next(target.parameters()).device)

    def capture(self, target: Any, *, may_hold: bool = False) -> VLLMCapture:
        """Capture keys and values before the drafter adds its layers; ServingError if it cannot."""
        config = self.vllm_config
        found = get_layers_from_vllm_config(config, Attention)
        layers = [found[name] for name in sorted(found, key=extract_layer_index)]
        require_capturable(layers, config.model_config.hf_config.num_hidden_layers)
        share = HeadShare(
            total=config.model_config.get_total_num_kv_heads(),
            ranks=config.parallel_config.tensor_parallel_size,
        )
        return VLLMCapture(
            layers,
            max_tokens=config.scheduler_config.max_num_batched_tokens,
            share=share,
            like=self.empty_like_target(target),
            may_hold=may_hold,
        )
