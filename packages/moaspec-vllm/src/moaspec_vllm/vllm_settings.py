"""vLLM's options that make it load this package. Imports nothing of vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moaspec_core.errors import InputError, ServingError

TESTED_VERSION = "0.32.0"
SUPPORTED_VERSIONS = "==0.32.*"
"""Releases of vLLM whose first model runner this plugin knows."""

PACKAGE = "moaspec_vllm"
PROPOSER = f"{PACKAGE}.proposer.VLLMMoAProposer"
SAMPLER = f"{PACKAGE}.vllm_sampling.SeededSampler"
WORKER = f"{PACKAGE}.vllm_worker.MoAWorker"
SCHEDULER = f"{PACKAGE}.scheduler.MoAScheduler"
CONFIG_KEY = "moaspec"  # our key in vLLM's `additional_config`
MAX_DRAFTED = 16
"""Longest draft. Drafters are trained on blocks of 5 to 15 tokens; vLLM verifies all of a draft."""


@dataclass(frozen=True, kw_only=True)
class VLLMServeSettings:
    """Options of a vLLM that drafts with a drafter."""

    model: str  # directory or hub id of the target
    drafter: str  # alias, directory or hub id of the drafter
    num_speculative_tokens: int = 3  # length of each draft, a chain

    def __post_init__(self) -> None:
        if not 1 <= self.num_speculative_tokens <= MAX_DRAFTED:
            raise InputError(
                f"A draft has 1 to {MAX_DRAFTED} tokens, got num_speculative_tokens="
                f"{self.num_speculative_tokens}. To serve without drafts, call `vllm serve` itself."
            )

    @property
    def engine_arguments(self) -> dict[str, Any]:
        own = {"drafter": self.drafter}
        return _arguments(self.model, PROPOSER, self.num_speculative_tokens, own)

    @property
    def command(self) -> list[str]:
        arguments = self.engine_arguments
        command = ["vllm", "serve", arguments.pop("model")]
        for name, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value)
            command += [f"--{name.replace('_', '-')}", text]
        return command


BLOCK_TOKENS = 32  # block size of vLLM's cache. Small, because a prefix is reused in whole blocks.


@dataclass(frozen=True, kw_only=True)
class VLLMVerifierSettings:
    """Options of a vLLM that verifies drafts sent by devices."""

    model: str  # directory or hub id of the target
    dtype: str  # data type of weights, keys and values
    max_rows: int  # maximum number of concurrent texts
    max_tokens: int  # maximum length of a text
    token_bytes: int  # bytes of one token's keys and values
    num_kv_heads: int = 1  # of the target
    tensor_parallel_size: int = 1  # ranks, each with its own KV heads
    features: bool = True  # whether a drafter's encoder reads the target's keys and values
    max_drafted: int = MAX_DRAFTED  # maximum number of drafted tokens that a round verifies
    # Further arguments of `vllm.EngineArgs`.
    extra_arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cache_tokens(self) -> int:
        """Tokens of all rows at maximum length, so that vLLM never evicts one."""
        blocks = -(-(self.max_tokens + 2 * self.max_drafted) // BLOCK_TOKENS)
        return self.max_rows * blocks * BLOCK_TOKENS

    @property
    def cache_bytes(self) -> int:
        """Bytes on a rank for `cache_tokens`, the block that vLLM reserves, and a spare block."""
        total = (self.cache_tokens + 2 * BLOCK_TOKENS) * self.token_bytes
        return total // min(self.num_kv_heads, self.tensor_parallel_size)

    @property
    def engine_arguments(self) -> dict[str, Any]:
        return {
            **_arguments(self.model, SAMPLER, self.max_drafted, {"features": self.features}),
            "dtype": self.dtype,
            "max_model_len": self.max_tokens,
            "max_num_seqs": self.max_rows,
            "kv_cache_memory_bytes": self.cache_bytes,
            "block_size": BLOCK_TOKENS,
            "tensor_parallel_size": self.tensor_parallel_size,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            **self.extra_arguments,
        }


def _arguments(
    model: str, proposer: str, num_drafted: int, own: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments that make vLLM load this package, with `own` as our section of its config."""
    return {
        "model": model,
        "speculative_config": {
            "method": "custom_class",
            "model": proposer,
            "num_speculative_tokens": num_drafted,
        },
        "additional_config": {CONFIG_KEY: own},
        "worker_cls": WORKER,
        "scheduler_cls": SCHEDULER,
    }


def drafter_name(additional_config: Any) -> str:
    """Name of the drafter in vLLM's `additional_config`; ServingError where it names none."""
    section = additional_config.get(CONFIG_KEY) if isinstance(additional_config, Mapping) else None
    name = section.get("drafter") if isinstance(section, Mapping) else None
    if not isinstance(name, str):
        raise ServingError(
            f"vLLM was not told which drafter to load: its additional_config is "
            f"{additional_config!r} and needs {{{CONFIG_KEY!r}: {{'drafter': NAME}}}}. "
            "`moaspec vllm-config` prints all options."
        )
    return name
