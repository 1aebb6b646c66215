"""What the custom classes that vLLM instantiates here have in common."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from moaspec.vllm_plugin import hooks
from moaspec.vllm_plugin.capture import HeadShare, KVCapture, require_capturable
from moaspec.vllm_plugin.refusals import check_settings


class Joined:
    """A custom class of vLLM's that our worker introduces to the model runner.

    Args:
        vllm_config: vLLM's whole configuration.

    Raises:
        ServingError: this vLLM, or a setting of it, cannot be joined.
        UnsupportedTargetError: the target's keys and values cannot be captured.
    """

    runner_hooks: tuple[str, ...] = ()
    """What is read of the model runner."""

    def __init__(self, vllm_config: Any) -> None:
        hooks.require_version()
        hooks.require_modules()
        check_settings(vllm_config)
        self.vllm_config = vllm_config
        self.runner: Any = None

    def start(self, runner: Any) -> None:
        """Find everything that a step needs; vLLM's caches are allocated.

        Raises:
            ServingError: this vLLM's model runner lacks something.
        """
        for path in self.runner_hooks:
            hooks.require(runner, path, owner_name=type(runner).__name__)
        self.runner = runner

    def settle(self) -> None:
        """What is left to do at the end of a step."""

    def like(self, target: Any) -> torch.Tensor:
        """A tensor of the target's dtype on its device."""
        dtype = self.vllm_config.model_config.dtype
        return torch.empty(0, dtype=dtype, device=next(target.parameters()).device)

    def capture(self, target: Any, *, may_hold: bool = False) -> KVCapture:
        """Read the target's keys and values from now on; to be called before other layers exist.

        Raises:
            ServingError: they cannot be read in this vLLM.
        """
        config = self.vllm_config
        found = get_layers_from_vllm_config(config, Attention)
        layers = [found[name] for name in sorted(found, key=extract_layer_index)]
        require_capturable(layers, config.model_config.hf_config.num_hidden_layers)
        share = HeadShare(
            total=config.model_config.get_total_num_kv_heads(),
            ranks=config.parallel_config.tensor_parallel_size,
        )
        most = config.scheduler_config.max_num_batched_tokens
        return KVCapture(
            layers, max_tokens=most, share=share, like=self.like(target), may_hold=may_hold
        )
