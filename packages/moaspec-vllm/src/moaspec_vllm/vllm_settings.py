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
UP_TO = "draft_up_to"  # in that section: see `VLLMServeSettings.draft_up_to`
MAX_DRAFTED = 16
"""Longest draft. Drafters are trained on blocks of 5 to 15 tokens; vLLM verifies all of a draft."""


@dataclass(frozen=True, kw_only=True)
class VLLMServeSettings:
    """Options of a vLLM that drafts with a drafter."""

    model: str  # directory or hub id of the target
    drafter: str  # alias, directory or hub id of the drafter
    num_speculative_tokens: int = 3  # length of each draft, a chain
    # Most requests of a step that drafts; None: the measured times of steps decide.
    draft_up_to: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_speculative_tokens <= MAX_DRAFTED:
            raise InputError(
                f"A draft has 1 to {MAX_DRAFTED} tokens, got num_speculative_tokens="
                f"{self.num_speculative_tokens}. To serve without drafts, call `vllm serve` itself."
            )
        if self.draft_up_to is not None and self.draft_up_to < 1:
            raise InputError(
                f"--draft-up-to takes a number of requests from 1 on, got {self.draft_up_to}."
            )

    @property
    def engine_arguments(self) -> dict[str, Any]:
        own: dict[str, Any] = {"drafter": self.drafter}
        if self.draft_up_to is not None:
            own[UP_TO] = self.draft_up_to
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
    name = _section(additional_config).get("drafter")
    if not isinstance(name, str):
        raise ServingError(
            f"vLLM was not told which drafter to load: its additional_config is "
            f"{additional_config!r} and needs {{{CONFIG_KEY!r}: {{'drafter': NAME}}}}. "
            "`moaspec vllm-config` prints all options."
        )
    return name


def draft_up_to(additional_config: Any) -> int | None:
    """Most requests of a step that drafts, None where it is not fixed.

    Raises:
        ServingError: it is no number from 1 on, or the section has other names.
    """
    section = _section(additional_config)
    if unknown := section.keys() - {"drafter", UP_TO}:
        raise ServingError(
            f"vLLM's additional_config has {sorted(unknown)} for moaspec, which takes 'drafter' "
            f"and {UP_TO!r}."
        )
    most = section.get(UP_TO)
    if most is not None and (type(most) is not int or most < 1):
        raise ServingError(
            f"{UP_TO} in vLLM's additional_config is a number from 1 on; got {most!r}."
        )
    return most


def _section(additional_config: Any) -> Mapping[str, Any]:
    section = additional_config.get(CONFIG_KEY) if isinstance(additional_config, Mapping) else None
    return section if isinstance(section, Mapping) else {}
