"""The time of a step of vLLM by part: the target, the proposer's products and attention, the rest.

A step is one call of vLLM's engine, made in this process and without asynchronous scheduling.
Decoding steps, at full concurrency and without a prompt, are reported apart from steps with one.
A few hundred clocks stand around calls of a step; they slow it down less than a profiler would.
Time within two clocks counts for the inner one alone, so the parts add up to the step.

    scripts/with_vllm.sh python benchmarks/vllm_profile.py --concurrency 1 4 16
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from vllm_common import Requests, engine, parser, prompt_ids, serve, speculative

from moaspec.calibration.measure_costs import machine

LONGEST_PROMPT = 320
SHARES = {
    "target": (
        "target: products",
        "target: attention",
        "target: head",
        "target: other",
        "sampling",
    ),
    "proposer's products": ("proposer: products",),
    "proposer's attention": ("proposer: attention",),
    "rest of the proposer": (
        "proposer: read",
        "proposer: encode",
        "proposer: draft",
        "proposer: other",
    ),
    "engine": ("engine", "metadata", "bookkeeping"),
}
"""The parts of a step that belong together."""

Parts = dict[str, float]


@dataclass
class Clock:
    """Seconds by part, each without the parts that are timed inside it."""

    seconds: Parts = field(default_factory=lambda: defaultdict(float))
    _inner: list[float] = field(default_factory=list)

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function that makes the call and adds its time to `name`."""
        inner, seconds, now = self._inner, self.seconds, time.perf_counter

        def measured(*args: Any, **kwargs: Any) -> Any:
            inner.append(0.0)
            started = now()
            try:
                return call(*args, **kwargs)
            finally:
                took = now() - started
                seconds[name] += took - inner.pop()
                if inner:
                    inner[-1] += took

        return measured


def main() -> None:
    """Print one line per method, concurrency and kind of step, then one line of JSON."""
    options = parser(__doc__)
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    options.add_argument("--max-new-tokens", type=int, default=48)
    options.add_argument("--methods", nargs="+", default=["moa"])
    args = options.parse_args()
    # The clocks are in this process, so the engine has to be.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    prompts = prompt_ids(args.model, args.suite, args.limit, longest=LONGEST_PROMPT)
    data = {
        "benchmark": "vllm_profile",
        "machine": machine(torch.device("cpu")),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "dtype": args.dtype,
        "draft_tokens": args.draft_tokens,
        "draft_up_to": args.draft_up_to,
    }
    rows = [row for method in args.methods for row in _profile(args, method, prompts)]
    print(json.dumps(data | {"rows": rows}))


def _profile(args: Any, method: str, prompts: list[list[int]]) -> list[dict[str, Any]]:
    rows = []
    with engine(
        **speculative(args, method),
        dtype=args.dtype,
        max_model_len=1024,
        max_num_seqs=max(args.concurrency),
        enable_prefix_caching=False,
        async_scheduling=False,
    ) as llm:
        clock = Clock()
        with _clocks(llm, clock):
            serve(llm, Requests(prompts[:1], [8]), 1)
            for concurrency in args.concurrency:
                chosen = prompts[:concurrency]
                steps = _steps(llm, clock, chosen, args.max_new_tokens)
                rows += [_row(method, concurrency, kind, own) for kind, own in steps.items()]
    return rows


def _steps(
    llm: Any, clock: Clock, prompts: list[list[int]], length: int
) -> dict[str, list[tuple[float, Parts]]]:
    """Seconds and parts of each step, by its kind."""
    found: dict[str, list[tuple[float, Parts]]] = defaultdict(list)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    step = clock.timed("engine", llm.llm_engine.step)

    def watched() -> Any:
        rows = list(scheduler.requests.values())
        reading = any(row.num_computed_tokens < row.num_prompt_tokens for row in rows)
        clock.seconds.clear()
        started = time.perf_counter()
        outputs = step()
        took = time.perf_counter() - started
        if reading or len(rows) == len(prompts):
            found["prompt" if reading else "decode"].append((took, clock.seconds.copy()))
        return outputs

    with mock.patch.object(llm.llm_engine, "step", watched):
        serve(llm, Requests(prompts, [length] * len(prompts)), len(prompts))
    return found


@contextlib.contextmanager
def _clocks(llm: Any, clock: Clock) -> Iterator[None]:
    """Clocks around the target's parts and the proposer's."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    with contextlib.ExitStack() as stack:

        def around(owner: Any, name: str, part: str) -> None:
            call = getattr(owner, name, None)
            if call is not None:
                stack.enter_context(mock.patch.object(owner, name, clock.timed(part, call)))

        _clocks_of_target(runner, around)
        drafter = getattr(runner, "drafter", None)
        if type(drafter).__module__.startswith("moaspec_vllm."):
            _clocks_of_proposer(drafter, around)
        elif drafter is not None:
            around(drafter, "propose", "proposer: draft")
        yield


def _clocks_of_target(runner: Any, around: Callable[[Any, str, str], None]) -> None:
    from vllm.model_executor.layers.linear import LinearBase

    for module in runner.model.modules():
        if isinstance(module, LinearBase):
            around(module, "forward", "target: products")
    around(runner.model, "forward", "target: other")
    around(runner.model, "compute_logits", "target: head")
    around(runner, "_sample", "sampling")
    around(runner, "_prepare_inputs", "metadata")
    around(runner, "_build_attention_metadata", "metadata")
    around(runner, "_bookkeeping_sync", "bookkeeping")
    for name, layer in runner.compilation_config.static_forward_context.items():
        owner = "proposer" if name.startswith("moa_spec.") else "target"
        around(layer.impl, "forward", f"{owner}: attention")
        around(layer.impl, "do_kv_cache_update", f"{owner}: attention")


def _clocks_of_proposer(drafter: Any, around: Callable[[Any, str, str], None]) -> None:
    """Kernels take norms, rotary embeddings and activations along: those count as products."""
    from moaspec.backends import fast_drafter
    from moaspec.backends.fast_drafter import FastAttentionBlock
    from moaspec.backends.pack import PackedLinear
    from moaspec_vllm.paged_drafter.cache_reader import CacheReader

    parts = drafter._parts
    for module in parts.drafter.modules():
        if isinstance(module, FastAttentionBlock):
            for name in ("project", "finish", "finish_mean"):
                around(module.fused, name, "proposer: products")
        elif isinstance(module, PackedLinear | nn.Linear):
            around(module, "forward", "proposer: products")
    around(parts.head, "_choose", "proposer: products")
    around(fast_drafter, "fast_attention", "proposer: attention")
    around(CacheReader, "read", "proposer: read")
    around(drafter, "propose", "proposer: other")
    around(drafter, "note_pass", "proposer: other")
    around(drafter._drafter, "encode", "proposer: encode")
    around(drafter._drafter, "draft", "proposer: draft")


def _row(
    method: str, concurrency: int, kind: str, steps: list[tuple[float, Parts]]
) -> dict[str, Any]:
    """Medians over steps, in milliseconds and as shares of the step."""
    names = sorted({name for _, parts in steps for name in parts})
    shares = {
        group: [sum(parts.get(name, 0.0) for name in own) / took for took, parts in steps]
        for group, own in SHARES.items()
    }
    row = {
        "method": method,
        "concurrency": concurrency,
        "kind": kind,
        "steps": len(steps),
        "ms": _ms(took for took, _ in steps),
        "shares": {group: round(statistics.median(all_), 4) for group, all_ in shares.items()},
        "parts_ms": {name: _ms(parts.get(name, 0.0) for _, parts in steps) for name in names},
    }
    print(row, flush=True)
    return row


def _ms(seconds: Iterator[float]) -> float:
    return round(1e3 * statistics.median(seconds), 3)


if __name__ == "__main__":
    main()
