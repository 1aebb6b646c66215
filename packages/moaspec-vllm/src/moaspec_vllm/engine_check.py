"""One engine of `moaspec vllm-check`, in a process of its own: its texts, and times of steps.

python -m moaspec_vllm.engine_check REQUEST.json ANSWER.json
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

WARM_STEPS = 4  # that are not timed, after all prompts are read


def main() -> None:
    """Read what to do, and write what was found."""
    asked = json.loads(Path(sys.argv[1]).read_text())
    # The steps' times and the runner are asked for, so the engine has to be in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if asked["arguments"]["dtype"] == "float32":
        # Else Triton's attention multiplies in TF32, whose bits depend on the batch.
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    from vllm import LLM

    llm = LLM(**asked["arguments"])
    prompts = _prompt_ids(llm, asked["prompts"])
    found: dict[str, Any] = {
        "engine": _facts(llm),
        "texts": _texts(llm, prompts, asked["tokens"]),
    }
    found["steps"] = [_steps(llm, prompts, number, asked["tokens"]) for number in asked["requests"]]
    if "speculative_config" in asked["arguments"]:
        found["engine"] |= _drafter_facts(llm)  # last, because failures count
    Path(sys.argv[2]).write_text(json.dumps(found))
    llm.llm_engine.engine_core.shutdown()


def _prompt_ids(llm: Any, prompts: list[str]) -> list[list[int]]:
    tokenizer = llm.get_tokenizer()
    if not getattr(tokenizer, "chat_template", None):
        return [tokenizer.encode(prompt) for prompt in prompts]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        for prompt in prompts
    ]


def _facts(llm: Any) -> dict[str, Any]:
    """What vLLM chose for this machine."""
    import torch
    from vllm.platforms import current_platform

    config = llm.llm_engine.vllm_config
    facts: dict[str, Any] = {
        "device": current_platform.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "ranks": config.parallel_config.tensor_parallel_size,
        "runner": "second" if config.use_v2_model_runner else "first",
        "asynchronous": bool(config.scheduler_config.async_scheduling),
        "graphs": config.compilation_config.cudagraph_mode.name,
        "capture sizes": config.compilation_config.cudagraph_capture_sizes,
        "tokens of a step": config.scheduler_config.max_num_batched_tokens,
        "blocks of the cache": config.cache_config.num_gpu_blocks,
        "block size": config.cache_config.block_size,
    }
    worker = getattr(llm.llm_engine.engine_core.engine_core.model_executor, "driver_worker", None)
    if worker is not None:  # one rank
        groups = [group for some in worker.worker.model_runner.attn_groups for group in some]
        facts["backend"] = ", ".join(sorted({group.backend.get_name() for group in groups}))
    return facts


def _drafter_facts(llm: Any) -> dict[str, Any]:
    """What became of the drafter: the first rank's facts, and the failures of all."""
    ranks = llm.collective_rpc("call_proposer", args=("facts",))
    return ranks[0] | {
        "failures": sum(one["failures"] for one in ranks),
        "drafts at the end": all(one["drafts at the end"] for one in ranks),
    }


def _texts(llm: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    from vllm import SamplingParams

    settings = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    batch: Any = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(batch, settings, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _steps(llm: Any, prompts: list[list[int]], number: int, tokens: int) -> dict[str, Any]:
    """Milliseconds of a step in which this many requests decode, and tokens of each in it.

    Both are None where the cache has no room for as many requests at once.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    requests = engine.engine_core.engine_core.scheduler.requests
    settings = SamplingParams(temperature=0, max_tokens=4 * tokens, ignore_eos=True)
    names = [
        engine.add_request(
            f"check-{number}-{index}",
            {"prompt_token_ids": prompts[index % len(prompts)]},
            settings,
        )
        for index in range(number)
    ]
    while any(one.num_computed_tokens < one.num_prompt_tokens for one in requests.values()):
        engine.step()
    for _ in range(WARM_STEPS):
        engine.step()
    took_s, written = list[float](), list[int]()
    while len(took_s) < tokens and len(requests) == number:
        before = sum(one.num_tokens for one in requests.values())
        started = time.perf_counter()
        engine.step()
        took_s.append(time.perf_counter() - started)
        if len(requests) == number:
            written.append(sum(one.num_tokens for one in requests.values()) - before)
    engine.abort_request(names, internal=True)
    while engine.has_unfinished_requests():
        engine.step()
    return {
        "requests": number,
        "step_ms": 1e3 * statistics.median(took_s) if took_s else None,
        "tokens_per_step": statistics.fmean(written) / number if written else None,
        "steps": len(took_s),
    }


if __name__ == "__main__":
    main()
