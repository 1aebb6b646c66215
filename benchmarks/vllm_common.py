"""What the benchmarks of the vLLM plugin share: engines, prompts, and requests that come and go."""

from __future__ import annotations

import argparse
import contextlib
import gc
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from moaspec.evaluate.prompt_suites import read_prompts
from moaspec.target.registry import find_weights, load_tokenizer
from moaspec_vllm.vllm_settings import VLLMServeSettings

SYSTEM = (
    "You are a careful assistant. Answer the question that is asked, and only that one. Say so "
    "when you do not know. Give facts before opinions, examples before rules, and numbers with "
    "their units. Prefer short sentences and plain words; do not repeat the question, do not "
    "apologise, and do not end with an offer of further help. If code is asked for, write it "
    "complete and without comments that merely repeat it."
)
"""Long enough that requests find one another's blocks."""


@dataclass
class Requests:
    """Prompts, the number of new tokens of each, and the texts."""

    prompts: Sequence[Sequence[int]]
    lengths: Sequence[int]
    texts: dict[int, list[int]] = field(default_factory=dict)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options of both benchmarks."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--drafter", default="smollm2-135m")
    options.add_argument("--suite", default="bundled")
    options.add_argument("--limit", type=int, default=30)
    options.add_argument("--draft-tokens", type=int, default=3)
    options.add_argument(
        "--eager", action="store_true", help="Without vLLM's compilation and CUDA graphs."
    )
    options.add_argument(
        "--draft-up-to", type=int, help="Most requests of a step that drafts; default: by load."
    )
    return options


def prompt_ids(model: str, suite: str, limit: int, *, longest: int) -> list[list[int]]:
    """First turns of a suite under the shared system message, the long ones left out."""
    tokenizer = load_tokenizer(find_weights(model))
    ids = [
        tokenizer.apply_chat_template(
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt.turns[0]}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for prompt in read_prompts(suite, limit=None)
    ]
    short = [one for one in ids if len(one) <= longest]
    # Suites are sorted by kind; take some of every kind.
    return short[:: max(1, len(short) // limit)][:limit]


def speculative(
    args: argparse.Namespace, method: str, drafter: str | None = None
) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for a method: plain, ngram or moa."""
    model = find_weights(args.model)
    common = {"model": model, "enforce_eager": args.eager}
    if method == "moa":
        arguments = VLLMServeSettings(
            model=model,
            drafter=drafter or args.drafter,
            num_speculative_tokens=args.draft_tokens,
            draft_up_to=args.draft_up_to,
        ).engine_arguments
        return arguments | common
    if method == "plain":
        return common
    settings = {
        "method": "ngram",
        "num_speculative_tokens": args.draft_tokens,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }
    return common | {"speculative_config": settings}


@contextlib.contextmanager
def engine(**arguments: Any) -> Iterator[Any]:
    """An engine of vLLM in this process."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(disable_log_stats=False, seed=0, **arguments)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def serve(llm: Any, requests: Requests, concurrency: int) -> int:
    """Greedy texts of all requests, one joining whenever another leaves; tokens written."""
    from vllm import SamplingParams

    waiting, running = deque(range(len(requests.prompts))), 0
    while waiting or running:
        while waiting and running < concurrency:
            index = waiting.popleft()
            settings = SamplingParams(
                temperature=0, max_tokens=requests.lengths[index], ignore_eos=True
            )
            prompt = {"prompt_token_ids": list(requests.prompts[index])}
            llm.llm_engine.add_request(str(index), prompt, settings)
            running += 1
        for output in llm.llm_engine.step():
            if output.finished:
                requests.texts[int(output.request_id)] = list(output.outputs[0].token_ids)
                running -= 1
    return sum(map(len, requests.texts.values()))


def counters(llm: Any) -> dict[str, float]:
    """VLLM's counters by name, without its prefix."""
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if hasattr(metric, "value"):
            name = metric.name.removeprefix("vllm:")
            found[name] = found.get(name, 0.0) + metric.value
    return found
