"""The kernel that reads tokens of all layers' caches on a GPU: equality with indexing, and times.

python benchmarks/vllm_gpu_kernel.py
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import torch

from moaspec_vllm.paged_drafter.gather_kernel import gather

LAYERS, BLOCKS, HEADS, SIZE, DIM = 32, 512, 8, 16, 128  # Llama-3-8B's
REPEATS = 50


def main() -> None:
    """Print one line of JSON; raises where a number differs."""
    rows = [row for by_token in (True, False) for row in _rows(by_token)]
    print(json.dumps({"benchmark": "vllm_gpu_kernel", "rows": rows}))


def _rows(by_token: bool) -> Iterator[dict[str, Any]]:
    layers = [_cache(by_token) for _ in range(LAYERS)]
    first = layers[0]
    distances = [one.data_ptr() - first.data_ptr() for one in layers]
    offsets_L = torch.tensor(distances, device="cuda") // first.element_size()
    places_OX = _places(first)
    for number in (1, 64, 256, 1024):
        slots_N = torch.randperm(BLOCKS * SIZE, device="cuda")[:number]
        arguments = first, offsets_L, slots_N, places_OX, first.stride(0)
        expected = [one[slots_N // SIZE, :, slots_N % SIZE] for one in layers]
        assert torch.equal(gather(*arguments), torch.stack(expected, dim=1).flatten(2))
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(REPEATS):
            gather(*arguments)
        torch.cuda.synchronize()
        took_s = (time.perf_counter() - started) / REPEATS
        yield {"by_token": by_token, "tokens": number, "us": round(1e6 * took_s, 1)}


def _cache(by_token: bool) -> torch.Tensor:
    """(blocks, heads, slots, key and value), whose memory has heads or slots further in."""
    if by_token:
        memory = torch.randn(BLOCKS, SIZE, HEADS, 2 * DIM, device="cuda", dtype=torch.bfloat16)
        return memory.transpose(1, 2)
    return torch.randn(BLOCKS, HEADS, SIZE, 2 * DIM, device="cuda", dtype=torch.bfloat16)


def _places(cache: torch.Tensor) -> torch.Tensor:
    """Where block 0 holds the elements of each slot, (slots, heads * key and value) int32."""
    axes = [
        torch.arange(size, device="cuda") * step
        for size, step in zip(cache.shape[1:], cache.stride()[1:], strict=True)
    ]
    place_HOX = axes[0][:, None, None] + axes[1][:, None] + axes[2]
    return place_HOX.transpose(0, 1).flatten(1).int()


if __name__ == "__main__":
    main()
