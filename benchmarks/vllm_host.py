"""Host time and tensor operations of the proposer in a step of vLLM, by number of requests.

A random target of a few thousand weights keeps computation small, so most of the time is Python and
the launch of operations, which a GPU waits for too. CPU time is counted, so other processes on the
machine change little. Every step drafts for all requests.

    scripts/with_vllm.sh python benchmarks/vllm_host.py --requests 1 16 64 256
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
DRAFT_TOKENS = 3


class Operations(TorchDispatchMode):
    """Counts operations by name, those of CPU kernels of moaspec and vLLM included."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **kwargs or {})


def main() -> None:
    """Print a line for each number of requests, then one line of JSON."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64, 256])
    options.add_argument("--context", type=int, default=200, help="tokens of a prompt")
    options.add_argument("--steps", type=int, default=12)
    args = options.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm_serving as serving

    with tempfile.TemporaryDirectory() as root:
        models = serving.write_models(Path(root))
        most = max(args.requests)
        changes: dict[str, Any] = {
            "max_num_seqs": most,
            "max_model_len": 512,
            "max_num_batched_tokens": 2048,
            "kv_cache_memory_bytes": 1 << 29,
            "enable_prefix_caching": False,
        }
        with serving.engine(models, models.random, **changes) as llm:
            rows = [_row(llm, number, args) for number in args.requests]
    print(json.dumps({"benchmark": "vllm_host", "context": args.context, "rows": rows}))


def _row(llm: Any, number: int, args: argparse.Namespace) -> dict[str, Any]:
    """Medians of steps in which all requests decode."""
    from vllm import SamplingParams

    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    settings = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    for index in range(number):
        ids = [(7 * index + 3 * place) % 64 for place in range(args.context)]
        llm.llm_engine.add_request(f"{number}-{index}", {"prompt_token_ids": ids}, settings)
    requests = core.scheduler.requests
    while any(one.num_computed_tokens < one.num_prompt_tokens for one in requests.values()):
        llm.llm_engine.step()
    for _ in range(12):  # until every prompt is encoded
        llm.llm_engine.step()
    drafter = runner.drafter
    spent: dict[str, list[float]] = {"note_pass": [], "propose": []}
    operations = Operations()

    def watched(name: str, *, count: bool) -> Any:
        call = getattr(type(drafter), name)

        def run(*arguments: Any, **named: Any) -> Any:
            if count:
                with operations:
                    return call(drafter, *arguments, **named)
            started = time.thread_time()
            try:
                return call(drafter, *arguments, **named)
            finally:
                spent[name].append(time.thread_time() - started)

        return run

    for count in (False, True):
        for name in spent:
            setattr(drafter, name, watched(name, count=count))
        for _ in range(args.steps):
            llm.llm_engine.step()
    for name in spent:
        delattr(drafter, name)
    llm.llm_engine.abort_request([f"{number}-{index}" for index in range(number)])
    llm.llm_engine.step()
    row = {
        "requests": number,
        "host_ms": {name: round(1e3 * statistics.median(all_), 3) for name, all_ in spent.items()},
        "operations": round(operations.counts.total() / args.steps, 1),
        "most": {k: round(v / args.steps, 1) for k, v in operations.counts.most_common(12)},
    }
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
