"""Times of steps in this vLLM, measured before it serves, with the graphs that serve."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from moaspec_vllm.load_aware import MeasuredSteps, Share
from moaspec_vllm.paged_drafter.encoded_tokens import Integers
from moaspec_vllm.paged_drafter.vllm_drafting import ENCODE_CHUNK, Backlog, PagedDrafter, Tokens
from moaspec_vllm.paged_drafter.vllm_target_layers import base_logits
from moaspec_vllm.target_graphs import OneTokenGraphs

REPEATS = 3  # timed runs of each size after an untimed one; the fastest counts
ENOUGH_S = 0.5  # time after which a size is not run again
MOST_S = 8.0  # time for each part; larger sizes than those measured until then are extrapolated
POSITION = 8  # of the newest token of requests that are drafted for; drafting does not depend on it
ENCODED = 2  # tokens of each request that a step encodes, about tau


def measure(
    runner: Any,
    drafter: PagedDrafter,
    graphs: OneTokenGraphs,
    *,
    length: int,
    max_requests: int,
    share: Share,
) -> MeasuredSteps:
    """Time steps with and without drafts, in unused blocks of the cache.

    Args:
        runner: vLLM's model runner, its caches allocated.
        drafter: on this runner, its graphs captured.
        graphs: of this runner.
        length: of the drafts.
        max_requests: most requests of a step.
        share: see `Share`.
    """
    limit, logits = runner.max_num_tokens, base_logits(runner.model)

    def run_pass(num_tokens: int, *, full: bool) -> None:
        # As in a step: vLLM picks the graph by the number of tokens and whether rows are alike.
        states_NE, _ = runner._dummy_run(num_tokens, uniform_decode=full)
        logits(states_NE[:num_tokens]).argmax(-1).tolist()

    def plain(number: int) -> None:
        run_pass(number, full=graphs.use(one_token=True))

    def drafted(number: int) -> None:
        graphs.use(one_token=False)
        run_pass(number * (1 + length), full=True)
        _work(drafter, number, ENCODED, length)

    def encode(num_tokens: int) -> None:
        _work(drafter, 1, num_tokens, 0)

    most = max(1, min(max_requests, limit // (1 + length)))
    plain_s = dict(_times(plain, most, share))
    drafted_s = dict(_times(drafted, most, share))
    encode_s = dict(_times(encode, min(limit, ENCODE_CHUNK), share))
    sizes = tuple(sorted(plain_s.keys() & drafted_s.keys()))
    longest = max(encode_s)
    return MeasuredSteps(
        sizes=sizes,
        plain_s=tuple(plain_s[size] for size in sizes),
        drafted_s=tuple(drafted_s[size] for size in sizes),
        token_s=encode_s[longest] / longest,
    )


def _work(drafter: PagedDrafter, num_requests: int, num_encoded: int, depth: int) -> None:
    """Encode tokens of each request, and draft for all, in the block that vLLM leaves unused."""
    rows_R = np.arange(num_requests)
    tokens = Tokens(
        rows_R.repeat(num_encoded),
        np.tile(np.arange(num_encoded) % drafter.block_size, num_requests),
    )
    none_R: Integers = np.zeros(0, np.int64)
    backlog = Backlog(none_R, none_R, tokens, tokens)
    drafts = rows_R if depth else none_R
    step = drafter.send(backlog, drafts, np.full(len(drafts), POSITION), depth)
    drafter.encode(step)
    if depth:
        drafter.draft(step)
    else:
        torch.zeros(1, device=drafter.device).tolist()  # waits for an accelerator


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
