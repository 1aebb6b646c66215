"""What vLLM is told on its command line. Imports nothing of vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moaspec.errors import InputError, ServingError

SUPPORTED_VERSIONS = ">=0.32,<0.34"
"""Releases of vLLM whose hooks this plugin knows; 0.32.0 is the one that tests run on."""

PACKAGE = "moaspec.vllm_plugin"
PROPOSER = f"{PACKAGE}.proposer.MoAProposer"
DECIDING = f"{PACKAGE}.deciding.Deciding"
WORKER = f"{PACKAGE}.worker.MoAWorker"
SCHEDULER = f"{PACKAGE}.scheduler.MoAScheduler"
COMPILATION = {"cudagraph_mode": "PIECEWISE"}
"""Graphs of whole passes would replay them without the step that reads keys and values."""
SECTION = "moaspec"
"""Our part of vLLM's `additional_config`."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Which drafter serves which target, and how far it drafts.

    Attributes:
        model: directory or hub id of the target, as vLLM gets it.
        drafter: alias, directory or hub id of the drafter.
        num_speculative_tokens: tokens of one draft; vLLM verifies chains.
    """

    model: str
    drafter: str
    num_speculative_tokens: int = 3

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1:
            raise InputError(
                f"A draft needs at least 1 token, got {self.num_speculative_tokens}. To serve "
                "without drafts, leave the speculative options out."
            )

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `vllm.LLM` and `vllm.AsyncEngineArgs`."""
        return {
            "model": self.model,
            "speculative_config": {
                "method": "custom_class",
                "model": PROPOSER,
                "num_speculative_tokens": self.num_speculative_tokens,
            },
            "additional_config": {SECTION: {"drafter": self.drafter}},
            "worker_cls": WORKER,
            "scheduler_cls": SCHEDULER,
            "compilation_config": COMPILATION,
        }

    @property
    def command(self) -> list[str]:
        """The `vllm serve` command, word by word."""
        arguments = self.engine_arguments
        command = ["vllm", "serve", arguments.pop("model")]
        for name, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value)
            command += [f"--{name.replace('_', '-')}", text]
        return command


BLOCK_TOKENS = 32
"""Of vLLM's cache. Few, because what a row shares with its earlier text is found by blocks."""


@dataclass(frozen=True, kw_only=True)
class Verifying:
    """vLLM as the verifier of drafts that devices send.

    Attributes:
        model: directory or hub id of the target.
        dtype: of its weights, keys and values.
        max_rows: texts at a time.
        max_tokens: of the longest text.
        token_bytes: keys and values of one token.
        features: whether a drafter's encoder wants the target's keys and values.
        max_drafted: drafts of a round that are verified; of more, the first ones.
        changes: further arguments of `vllm.EngineArgs`.
    """

    model: str
    dtype: str
    max_rows: int
    max_tokens: int
    token_bytes: int
    features: bool = True
    max_drafted: int = 16
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cache_tokens(self) -> int:
        """Room for all rows at their longest, so that none is ever driven out."""
        blocks = -(-(self.max_tokens + 2 * self.max_drafted) // BLOCK_TOKENS)
        return self.max_rows * blocks * BLOCK_TOKENS

    @property
    def cache_bytes(self) -> int:
        """The same with the block that vLLM keeps for itself, and one to spare."""
        return (self.cache_tokens + 2 * BLOCK_TOKENS) * self.token_bytes

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `vllm.EngineArgs`."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "max_model_len": self.max_tokens,
            "max_num_seqs": self.max_rows,
            "kv_cache_memory_bytes": self.cache_bytes,
            "block_size": BLOCK_TOKENS,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "additional_config": {SECTION: {"features": self.features}},
            "compilation_config": COMPILATION,
            "speculative_config": {
                "method": "custom_class",
                "model": DECIDING,
                "num_speculative_tokens": self.max_drafted,
            },
            "worker_cls": WORKER,
            "scheduler_cls": SCHEDULER,
            **self.changes,
        }


def drafter_name(additional_config: Any) -> str:
    """Which drafter vLLM was told to load.

    Raises:
        ServingError: none.
    """
    section = additional_config.get(SECTION) if isinstance(additional_config, Mapping) else None
    name = section.get("drafter") if isinstance(section, Mapping) else None
    if not isinstance(name, str):
        raise ServingError(
            f"vLLM was not told which drafter to load: its additional_config is "
            f"{additional_config!r} and needs {{{SECTION!r}: {{'drafter': NAME}}}}. "
            "`moaspec vllm-config` prints all options."
        )
    return name
