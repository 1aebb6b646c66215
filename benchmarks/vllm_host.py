"""Host time and tensor operations of the proposer in a step of vLLM, by number of requests.

A random target of a few thousand weights keeps computation small, so most of the time is Python and
the launch of operations, which a GPU waits for too. CPU time is counted, so other processes on the
machine change little. Every step drafts for all requests.

    scripts/with_vllm.sh python benchmarks/vllm_host.py --requests 1 16 64 256
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
DRAFT_TOKENS = 3


class Operations(TorchDispatchMode):
    """Counts operations by name, those of CPU kernels included, and the CPU time in them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        started = time.thread_time()
        found = func(*args, **kwargs or {})
        self.seconds += time.thread_time() - started
        return found


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
    """Medians of decoding steps."""
    names = _start(llm, number, args.context)
    core = llm.llm_engine.engine_core.engine_core
    drafter = core.model_executor.driver_worker.worker.model_runner.drafter
    host_s, python_s, operations = list[float](), list[float](), Operations()
    for counted in (False, True):
        for _ in range(args.steps):
            spent = {"host": 0.0}
            operations.seconds = 0.0
            with _watched(drafter, spent, operations if counted else contextlib.nullcontext()):
                llm.llm_engine.step()
            if counted:
                python_s.append(spent["host"] - operations.seconds)
            else:
                host_s.append(spent["host"])
    llm.llm_engine.abort_request(names, internal=True)
    llm.llm_engine.step()
    row = {
        "requests": number,
        "host_ms": round(1e3 * statistics.median(host_s), 3),
        "outside_operations_ms": round(1e3 * statistics.median(python_s), 3),
        "operations": round(operations.counts.total() / args.steps, 1),
        "most": {k: round(v / args.steps, 1) for k, v in operations.counts.most_common(8)},
    }
    print(row, flush=True)
    return row


def _start(llm: Any, number: int, context: int) -> list[str]:
    """Requests with different prompts, all encoded; their names."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    settings = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    names = []
    for index in range(number):
        ids = [(7 * index + 3 * place) % 64 for place in range(context)]
        name = engine.add_request(f"{number}-{index}", {"prompt_token_ids": ids}, settings)
        names.append(name)
    requests = engine.engine_core.engine_core.scheduler.requests
    while any(one.num_computed_tokens < one.num_prompt_tokens for one in requests.values()):
        engine.step()
    for _ in range(4 + number * context // 2048):
        engine.step()
    return names


@contextlib.contextmanager
def _watched(drafter: Any, spent: dict[str, float], around: Any) -> Iterator[None]:
    """Add the CPU time of the proposer's calls to `spent`."""

    def timed(call: Any) -> Any:
        def run(*arguments: Any, **named: Any) -> Any:
            with around:
                started = time.thread_time()
                try:
                    return call(*arguments, **named)
                finally:
                    spent["host"] += time.thread_time() - started

        return run

    with contextlib.ExitStack() as stack:
        for name in ("note_pass", "propose"):
            call = timed(getattr(drafter, name))
            stack.enter_context(mock.patch.object(drafter, name, call))
        yield


if __name__ == "__main__":
    main()
