"""The speed of drafting inside vLLM, beside plain vLLM and its n-gram drafter.

One engine per method runs in turn on the same requests, each in processes of its own unless asked
otherwise (vLLM's n-gram drafter does not start beside others in one process). Figures are medians
of tokens/s and of each run's ratio to the plain run beside it. In float32 the texts must be equal,
or there are no figures. `vllm_profile.py` divides the time of a step.

    scripts/with_vllm.sh python benchmarks/vllm_speed.py --in-process --methods plain moa
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from vllm_common import Requests, counters, engine, parser, prompt_ids, serve, speculative

from moaspec.calibration.measure_costs import machine

METHODS = ("plain", "ngram", "moa")
LONGEST_PROMPT = 320


def main() -> None:
    """Print one line per method, then one line of JSON."""
    options = parser(__doc__)
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 32])
    options.add_argument("--max-new-tokens", type=int, default=64)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--methods", nargs="+", default=[*METHODS])
    options.add_argument(
        "--in-process",
        action="store_true",
        help="Engines in this process: apart, they take time of few cores while they wait.",
    )
    options.add_argument(
        "--cpu-seconds",
        action="store_true",
        help="Count this process's CPU seconds, where others share the CPU. For one thread, with "
        "--in-process; the plugin's own clock counts them, too.",
    )
    options.add_argument("--pause", action="store_true", help="Wait for Enter before measuring.")
    args = options.parse_args()
    if args.cpu_seconds:
        time.perf_counter = time.process_time
    prompts = prompt_ids(args.model, args.suite, args.limit, longest=LONGEST_PROMPT)
    data = {
        "benchmark": "vllm_speed",
        "machine": machine(torch.device("cpu")),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "dtype": args.dtype,
        "cpu_seconds": args.cpu_seconds,
        "draft_tokens": args.draft_tokens,
        "draft_up_to": args.draft_up_to,
    }
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if args.in_process else "1"
    print(json.dumps(data | {"rows": _speeds(args, prompts)}))


def _arguments(args: Any, method: str) -> dict[str, Any]:
    return speculative(args, method) | {
        "dtype": args.dtype,
        "max_model_len": 1024,
        "max_num_seqs": max(args.concurrency),
        # Every run reads its prompts; hits would favour the second method.
        "enable_prefix_caching": False,
    }


def _speeds(args: Any, prompts: list[list[int]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        engines = {
            method: stack.enter_context(engine(**_arguments(args, method)))
            for method in args.methods
        }
        for llm in engines.values():
            serve(llm, Requests(prompts[:1], [8]), 1)
        if args.pause:
            input("Engines are ready; press Enter to measure. ")
        for concurrency in args.concurrency:
            # Two waves of requests, one where they would take too long one by one.
            chosen = prompts[: max(2, concurrency)]
            rows += _compare(args, engines, chosen, concurrency)
    return rows


def _compare(
    args: Any, engines: Mapping[str, Any], prompts: list[list[int]], concurrency: int
) -> list[dict[str, Any]]:
    speeds: dict[str, list[float]] = {method: [] for method in engines}
    texts: dict[str, dict[int, list[int]]] = {}
    drafted: dict[str, Counter[str]] = {method: Counter() for method in engines}
    for number in range(args.rounds):
        for method, llm in [*engines.items()][:: (-1) ** number]:
            requests = Requests(prompts, [args.max_new_tokens] * len(prompts))
            # Counters are one process's, of all engines in it.
            before = counters(llm)
            started = time.perf_counter()
            tokens = serve(llm, requests, concurrency)
            speeds[method].append(tokens / (time.perf_counter() - started))
            texts[method] = requests.texts
            drafted[method].update(counters(llm))
            drafted[method].subtract(before)
    if args.dtype == "float32" and any(text != texts["plain"] for text in texts.values()):
        raise SystemExit("Texts differ in float32; no figures.")
    return [_speed_row(method, concurrency, speeds, drafted[method]) for method in engines]


def _speed_row(
    method: str, concurrency: int, speeds: Mapping[str, list[float]], grown: Mapping[str, float]
) -> dict[str, Any]:
    drafts = grown.get("spec_decode_num_drafts", 0.0)
    accepted = grown.get("spec_decode_num_accepted_tokens", 0.0)
    pairs = zip(speeds[method], speeds["plain"], strict=True)
    row = {
        "method": method,
        "concurrency": concurrency,
        "tokens_per_s": statistics.median(speeds[method]),
        "spread": [min(speeds[method]), max(speeds[method])],
        "ratio": statistics.median(one / plain for one, plain in pairs),
        "drafted_rounds": drafts,
        "tau_of_drafted_rounds": 1 + accepted / drafts if drafts else None,
    }
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
