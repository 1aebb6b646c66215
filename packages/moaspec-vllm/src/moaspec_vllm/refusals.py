"""Checks at start that refuse unsupported settings of vLLM and unsupported drafters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moaspec.generation.destinations import vllm_problem
from moaspec.model.moa import MoADrafter
from moaspec.target.families import require_supported
from moaspec_core.errors import MismatchError, ServingError
from moaspec_vllm.vllm_settings import SCHEDULER, WORKER

PLAIN_CACHES = ("auto", "float32", "float16", "bfloat16")

_Rule = tuple[Callable[[Any], Any], str]

_RULES: tuple[_Rule, ...] = (
    (
        lambda c: c.parallel_config.worker_cls != WORKER,
        f"the proposer reads vLLM's batch through its worker: add --worker-cls {WORKER}",
    ),
    (
        lambda c: c.scheduler_config.scheduler_cls != SCHEDULER,
        f"drafts need cache slots that only this scheduler reserves: add --scheduler-cls "
        f"{SCHEDULER}",
    ),
    (
        lambda c: c.model_config.use_mla,
        "the target's attention (MLA) keeps one compressed vector per token instead of the keys "
        "and values that a drafter reads: use `moaspec serve`",
    ),
    (
        lambda c: c.cache_config.cache_dtype not in PLAIN_CACHES,
        "a quantised key-value cache would hold the drafter's own keys too, and nothing of that "
        "was tested: use --kv-cache-dtype auto",
    ),
    (
        lambda c: c.model_config.logits_processors,
        "vLLM applies custom logits processors to one token per request and step, and speculation "
        "verifies several: leave --logits-processors out",
    ),
    (
        lambda c: c.parallel_config.pipeline_parallel_size > 1,
        "a pipeline stage sees the keys and values of its own layers, and a drafter reads those "
        "of all: use tensor parallelism",
    ),
    (
        lambda c: (
            c.parallel_config.decode_context_parallel_size > 1
            or c.parallel_config.prefill_context_parallel_size > 1
        ),
        "context parallelism spreads one text's tokens over ranks: use tensor parallelism",
    ),
    (
        lambda c: c.kv_transfer_config is not None,
        "blocks that a KV connector loads bring the target's keys and values, but not the "
        "drafter's, whose cache would keep those of another text: leave --kv-transfer-config out",
    ),
)


def check_settings(vllm_config: Any) -> None:
    """Refuse settings of vLLM that drafting does not support.

    Raises:
        ServingError: names the setting, the reason and the remedy.
        UnsupportedTargetError: the target is of no family that is supported here.
    """
    for applies, reason in _RULES:
        if applies(vllm_config):
            raise ServingError(f"Cannot draft with these settings of vLLM: {reason}.")
    require_supported(vllm_config.model_config.hf_config, vllm_config.model_config.model)


def check_drafter(drafter: MoADrafter) -> None:
    """MismatchError for a drafter with parts that are not implemented inside vLLM."""
    problem = vllm_problem(drafter.config)
    if problem is not None:
        raise MismatchError(problem)
