"""A GGUF target in its file's bits beside llama.cpp: plain decoding, prompts, load, memory, passes.

Both read one file with as many threads and take turns; llama.cpp's process is idle in ours. The
cost of passes stands beside the time of reading the weights once, at the speed at which PyTorch
sums numbers here (`read_ms`): no pass is faster, but for weights that stay in a cache.

llama.cpp comes with the binding `xllamacpp`: pip install xllamacpp.

    python benchmarks/formats.py --model qwen2.5-coder-1.5b --dtype bfloat16 --threads 2
"""

from __future__ import annotations

import json
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import parser, setting
from llamacpp import LlamaCpp

from moaspec import Target, generate, load_target
from moaspec.backends.fast_target import weight_bytes
from moaspec.drafting.kv_cache import KVCache
from moaspec.evaluate.prompt_suites import read_prompts
from moaspec.target.decoder_layers import Slots
from moaspec.target.registry import find_target_gguf
from moaspec_core.cli.prompts import chat_ids

PROMPTS = (40, 500, 4000)
ROWS = (1, 2, 4, 5, 8, 16, 64)
TEXT = Path(__file__).parents[1] / "docs"


def main() -> None:
    """Print a table, then one line of JSON."""
    options = parser(__doc__)
    options.add_argument("--max-new-tokens", type=int, default=128)
    options.add_argument("--runs", type=int, default=3)
    args = options.parse_args()
    gguf = find_target_gguf(args.model)
    if gguf is None:
        raise SystemExit(f"{args.model} is no GGUF file that is here.")
    torch.set_num_threads(args.threads)
    before, start = _resident_mb(), time.perf_counter()
    target = load_target(args.model, dtype=args.dtype)
    found: dict[str, Any] = {
        "benchmark": "formats",
        "setting": setting(target),
        "file_mb": gguf.stat().st_size / 1e6,
        "weights_mb": weight_bytes(target) / 1e6,
        "load_s": time.perf_counter() - start,
        "peak_mb_over_imports": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3 - before,
    }
    target.threads = None  # llama.cpp's process, which has just had its turn, takes no core
    llama = LlamaCpp(gguf, threads=args.threads, context=8192)
    found["llama_cpp"] = llama.version
    tokenizer: Any = target.tokenizer
    text = tokenizer.encode("".join(path.read_text() for path in sorted(TEXT.glob("*.md"))))
    asked = [chat_ids(target, prompt.turns[0]) for prompt in read_prompts("bundled-code")]
    speeds: dict[str, tuple[list[float], list[float]]] = {}
    for run in range(args.runs):
        prompt = asked[run % len(asked)]
        start, most = time.perf_counter(), args.max_new_tokens
        result = generate(target, prompt, max_new_tokens=most, stop_token_ids=())
        seconds = time.perf_counter() - start
        ours, theirs = speeds.setdefault("decoding", ([], []))
        ours.append(len(result.token_ids) / seconds)
        theirs.append(llama.tokens_per_s(prompt, most))
        for length in PROMPTS:
            ids = text[run * 97 : run * 97 + length]
            start = time.perf_counter()
            generate(target, ids, max_new_tokens=1)
            ours, theirs = speeds.setdefault(f"prompt of {length}", ([], []))
            ours.append(length / (time.perf_counter() - start))
            theirs.append(llama.prompt_tokens_per_s(ids))
    print(f"{'':16} {'moaspec':>9} {'llama.cpp':>9} {'ratio':>6}   tokens/s")
    for name, both in speeds.items():
        ours_s, theirs_s = map(statistics.median, both)
        found[name] = {"moaspec": ours_s, "llama.cpp": theirs_s, "ratio": ours_s / theirs_s}
        print(f"{name:16} {ours_s:9.1f} {theirs_s:9.1f} {ours_s / theirs_s:6.2f}")
    found["passes_ms"] = {rows: _pass_ms(target, rows) for rows in ROWS}
    found["read_ms"] = 1e3 * weight_bytes(target) / _read_speed()
    one = found["passes_ms"][1]
    for rows, took in found["passes_ms"].items():
        print(f"pass over {rows:2} tokens: {took:6.1f} ms, {took / one:.2f} of one")
    for name in ("read_ms", "load_s", "file_mb", "weights_mb", "peak_mb_over_imports"):
        print(f"{name}: {found[name]:.1f}")
    print(json.dumps(found))


def _pass_ms(target: Target, rows: int) -> float:
    """Milliseconds of a pass over the newest tokens of a text, with the target's choices."""
    cache = KVCache(target)
    cache.reserve(1, 256)
    text_pass = target.text_pass()
    if text_pass is None:
        raise SystemExit("There are no kernels for this target here.")
    took = []
    for run in range(13):
        slots = Slots(cache.data, [0], [100], 100 + rows)
        start = time.perf_counter()
        text_pass.run(
            [17 + run] * rows, [i - 1 for i in range(rows)], slots, finished=rows, choices=rows
        )
        took.append(time.perf_counter() - start)
    return 1e3 * statistics.median(took[3:])


def _read_speed() -> float:
    """Bytes a second that all threads read, of memory outside the caches."""
    numbers = torch.ones(2**28)
    took = []
    for _ in range(5):
        start = time.perf_counter()
        numbers.sum()
        took.append(time.perf_counter() - start)
    return numbers.nbytes / min(took)


def _resident_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


if __name__ == "__main__":
    main()
