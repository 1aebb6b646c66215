"""Times of passes, drafts and encodings in this vLLM, measured before it serves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from moaspec_core.policy.cost_model import CostTable
from moaspec_vllm.load_aware import Share
from moaspec_vllm.paged_drafter.vllm_drafting import ENCODE_CHUNK, PagedDrafter
from moaspec_vllm.paged_drafter.vllm_target_layers import base_logits

REPEATS = 3  # timed runs of each size after an untimed one; the fastest counts
ENOUGH_S = 0.5  # time after which a size is not run again
MOST_S = 8.0  # time for each part; larger sizes than those measured until then are extrapolated
POSITION = 8  # of the newest token of requests that are drafted for; drafting does not depend on it


def measure(
    runner: Any,
    drafter: PagedDrafter,
    *,
    longest: int,
    max_requests: int,
    share: Share,
) -> CostTable:
    """Time passes of the target, drafts and encodings, in unused blocks of the cache.

    Args:
        runner: vLLM's model runner, its caches allocated.
        drafter: on this runner.
        longest: the longest draft.
        max_requests: most requests of a step.
        share: see `Share`.
    """
    limit, logits = runner.max_num_tokens, base_logits(runner.model)

    def run_pass(num_tokens: int) -> None:
        states_NE, _ = runner._dummy_run(num_tokens)
        logits(states_NE[:num_tokens]).argmax(-1).tolist()

    def encode(num_tokens: int) -> None:
        row_N = np.zeros(num_tokens, np.int64)
        position_N = np.arange(num_tokens) % drafter.block_size
        drafter.encode_target(row_N, position_N)
        drafter.encode_text(row_N, position_N)
        torch.zeros(1, device=drafter.device).tolist()  # waits for an accelerator

    def draft(depth: int) -> Callable[[int], object]:
        return lambda rows: drafter.draft(range(rows), [0] * rows, [POSITION] * rows, depth)

    pass_s = dict(_times(run_pass, min(limit, max_requests * (1 + longest)), share))
    encode_s = dict(_times(encode, min(limit, ENCODE_CHUNK), share))
    first_s = dict(_times(draft(1), max_requests, share))
    longer_s = dict(_times(draft(1 + longest), max_requests, share))
    widths = tuple(sorted(first_s.keys() & longer_s.keys()))
    tokens = tuple(sorted(pass_s.keys() & encode_s.keys()))
    return CostTable(
        contexts=(1,),
        tokens=tokens,
        pass_s=(tuple(pass_s[token] for token in tokens),),
        head_s=(0.0,) * len(tokens),
        root_s=first_s[1],
        widths=widths,
        step_s=tuple(max(0.0, longer_s[width] - first_s[width]) / longest for width in widths),
        encode_s=tuple(encode_s[token] for token in tokens),
    )


def _times(call: Callable[[int], object], most: int, share: Share) -> Iterator[tuple[int, float]]:
    """Pairs of a size and the seconds of a call with it: powers of two, then `most`."""
    size, spent_s = 1, 0.0
    while spent_s < MOST_S:
        fastest_s, before_s = math.inf, spent_s
        for number in range(1 + REPEATS):
            started = time.perf_counter()
            call(size)
            # Ranks of tensor parallelism stop together.
            (took_s,) = share([time.perf_counter() - started])
            spent_s += took_s
            if number:
                fastest_s = min(fastest_s, took_s)
            if number and spent_s - before_s > ENOUGH_S:
                break
        yield size, fastest_s
        if size >= most:
            return
        size = min(2 * size, most)
