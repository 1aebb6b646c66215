"""Base of the classes that vLLM instantiates for `method: custom_class`."""

from __future__ import annotations

from typing import Any

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from moaspec_vllm import hooks
from moaspec_vllm.paged_drafter.cache_reader import HeadShare, require_readable
from moaspec_vllm.refusals import check_settings


class CustomProposer:
    """A custom class of vLLM's that `MoAWorker` connects to the model runner.

    Raises:
        ServingError: this vLLM version or one of its settings is not supported.
        UnsupportedTargetError: the target is of no supported family.
    """

    runner_hooks: tuple[str, ...] = ()  # attributes of the model runner that the class reads

    def __init__(self, vllm_config: Any) -> None:
        hooks.require_version()
        check_settings(vllm_config)
        self.vllm_config = vllm_config
        self.runner: Any = None

    def start(self, runner: Any) -> None:
        """Keep the runner with its caches; ServingError if it lacks `runner_hooks`."""
        for path in self.runner_hooks:
            hooks.require(runner, path)
        self.runner = runner

    def profile(self) -> None:
        """Called by the worker while vLLM measures how much memory a step needs."""

    def prepare(self) -> None:
        """Called by the worker before vLLM serves, when its caches are allocated."""

    def begin_step(self, num_tokens: int, num_requests: int) -> None:
        """Called by the worker before each pass of the target over these tokens and requests."""

    def note_pass(self) -> None:
        """Called by the worker after each pass of the target over at least one token."""

    def target_layers(self) -> list[Any]:
        """The target's attention layers in order, before the drafter adds its own.

        Raises:
            ServingError: a layer's keys and values cannot be read.
        """
        found = get_layers_from_vllm_config(self.vllm_config, Attention)
        layers = [found[name] for name in sorted(found, key=extract_layer_index)]
        require_readable(layers, self.vllm_config.model_config.hf_config.num_hidden_layers)
        return layers

    @property
    def share(self) -> HeadShare:
        """Distribution of the target's KV heads over ranks."""
        return HeadShare(
            total=self.vllm_config.model_config.get_total_num_kv_heads(),
            ranks=self.vllm_config.parallel_config.tensor_parallel_size,
        )
