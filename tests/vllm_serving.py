"""A tiny target and drafters on disk, and vLLM's engine in this process."""

from __future__ import annotations

import contextlib
import gc
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny
from moaspec.model.checkpoint.moa_checkpoint import save_drafter
from moaspec.target.target import Target
from moaspec_vllm.vllm_settings import VLLMServeSettings

DRAFT_TOKENS = 3
NEW_TOKENS = 24
SIZES: dict[str, Any] = {
    # vLLM's attention on CPUs knows heads of 32 and more.
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "disable_log_stats": False,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 1 << 25,
    "seed": 0,
}


@dataclass(frozen=True)
class Models:
    """Directories of a target and of drafters for it."""

    target: Target
    path: Path
    random: Path
    taught: Path


def write_models(root: Path) -> Models:
    """A Llama-like target, a random drafter, and one with two SA layers that learned its texts."""
    of = tiny.fresh_target(tokenizer=tiny.tokenizer(), **SIZES)
    models = Models(of, root / "target", root / "random", root / "taught")
    of.model.save_pretrained(models.path)
    assert of.tokenizer is not None
    of.tokenizer.save_pretrained(models.path)
    save_drafter(tiny.random_drafter(of), models.random)
    texts = [tiny.own_text(of, prompt) for prompt in tiny.PROMPTS]
    save_drafter(tiny.taught_drafter(of, texts, sa_layers=2), models.taught)
    return models


def arguments(
    models: Models, drafter: Path | None, *, draft_up_to: int | None = 1024
) -> dict[str, Any]:
    """What vLLM is started with.

    Args:
        models: where the target is.
        drafter: None: plain vLLM.
        draft_up_to: most requests of a step that drafts. By default every step drafts, so that
            rounds can be counted; None: as the load decides.
    """
    if drafter is None:
        return {"model": str(models.path)}
    serving = VLLMServeSettings(
        model=str(models.path),
        drafter=str(drafter),
        num_speculative_tokens=DRAFT_TOKENS,
        draft_up_to=draft_up_to,
    )
    return serving.engine_arguments


@contextlib.contextmanager
def engine(
    models: Models, drafter: Path | None, *, draft_up_to: int | None = 1024, **changes: Any
) -> Iterator[Any]:
    """VLLM with this drafter, or without one; see `arguments`."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(**(ENGINE | arguments(models, drafter, draft_up_to=draft_up_to) | changes))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def texts(
    llm: Any,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    concurrency: int,
    sampled: Collection[int] = (),
) -> list[list[int]]:
    """Greedy texts; a request joins whenever one leaves.

    Args:
        llm: vLLM's.
        prompts: token ids.
        lengths: of the texts.
        concurrency: requests at a time.
        sampled: which of them have a temperature, and one token to choose from.
    """
    from vllm import SamplingParams

    waiting, done, running = deque(range(len(prompts))), {}, 0
    while waiting or running:
        while waiting and running < concurrency:
            index = waiting.popleft()
            chosen = {"temperature": 0.8, "top_k": 1} if index in sampled else {"temperature": 0}
            settings = SamplingParams(**chosen, max_tokens=lengths[index], ignore_eos=True)
            prompt = {"prompt_token_ids": list(prompts[index])}
            llm.llm_engine.add_request(str(index), prompt, settings)
            running += 1
        for output in llm.llm_engine.step():
            if output.finished:
                done[int(output.request_id)] = list(output.outputs[0].token_ids)
                running -= 1
    return [done[index] for index in range(len(prompts))]


def counter(llm: Any, name: str) -> float:
    """One of vLLM's counters."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}")


def tau(llm: Any) -> float:
    """Tokens per verification, from vLLM's own counters."""
    accepted = counter(llm, "spec_decode_num_accepted_tokens")
    return 1.0 + accepted / counter(llm, "spec_decode_num_drafts")
