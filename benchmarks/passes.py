"""The cost of passes over 1 to 64 tokens of a GGUF target, beside what the CPU allows.

Exact products and those of inputs in 8 bits (--quantize inputs) take turns. No pass is faster than
reading the weights once, at the speed at which PyTorch sums numbers here, nor than its products
by the instruction that multiplies most, whose speed a loop compiled here measures: the larger of
both is the roofline. The last line is JSON. Each set of kernels:

    for mode in avx512 avxvnni avx2; do
        MOASPEC_KERNELS=$mode python benchmarks/passes.py --model qwen2.5-coder-0.5b --threads 2
    done
"""

from __future__ import annotations

import ctypes
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from common import parser, setting

from moaspec import Target, load_target
from moaspec.backends.cpu.build import _compiler, instructions
from moaspec.backends.cpu.compiler_flags import FLAGS, INSTRUCTIONS
from moaspec.backends.fast_target import weight_bytes
from moaspec.drafting.kv_cache import KVCache
from moaspec.target.decoder_layers import Slots

ROWS = (1, 2, 4, 5, 8, 16, 64)
WAYS = {"exact": None, "inputs in 8 bits": "inputs"}
PRODUCTS = {
    "avx2": (("vfmadd231ps %ymm14,%ymm15,%ymm{}", 8), ("vpmaddubsw %ymm14,%ymm15,%ymm{}", 32)),
    "avxvnni": (
        ("vfmadd231ps %ymm14,%ymm15,%ymm{}", 8),
        ("{{vex}} vpdpbusd %ymm14,%ymm15,%ymm{}", 32),
    ),
    "avx512": (
        ("vdpbf16ps %zmm14,%zmm15,%zmm{}", 32),
        ("vpdpbusd %zmm14,%zmm15,%zmm{}", 64),
    ),
}
"""For each set of kernels, how it multiplies exactly and in integers, and products of each."""
PRODUCTS["amx"] = PRODUCTS["avx512"]  # of a GGUF file's weights
INDEPENDENT = 12  # instructions, which hide each other's latency
LOOPS = 2_000_000


def main() -> None:
    """Print a table, then one line of JSON."""
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=11)
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    targets = {
        name: load_target(args.model, dtype="bfloat16", quantize=quantize)
        for name, quantize in WAYS.items()
    }
    for target in targets.values():
        target.threads = None  # it would count the other one's turns as another program
    exact = targets["exact"]
    kernels = instructions()
    if kernels is None:
        raise SystemExit("There are no kernels here.")
    read_ms = 1e3 * weight_bytes(exact) / read_speed()
    peaks = [args.threads * peak(kernels, *how) for how in PRODUCTS[kernels]]
    passes = {name: TimedPasses(target) for name, target in targets.items()}
    took_ms = {name: dict[int, float]() for name in WAYS}
    for rows in ROWS:
        seconds: dict[str, list[float]] = {name: [] for name in WAYS}
        for run in range(2 + args.runs):
            for name, one in passes.items():
                seconds[name].append(one.run(rows, run))
        for name, found in seconds.items():
            took_ms[name][rows] = 1e3 * statistics.median(found[2:])
    weights = num_weights(exact)
    bound_ms = {
        name: {rows: max(read_ms, 1e3 * rows * weights / speed) for rows in ROWS}
        for name, speed in zip(WAYS, peaks, strict=True)
    }
    print(f"{kernels}: reading the weights once {read_ms:.1f} ms")
    print(f"{'tokens':>6}  " + "  ".join(f"{name + ': ms, of one, roof':>36}" for name in WAYS))
    for rows in ROWS:
        line = f"{rows:6}  "
        for name, took in took_ms.items():
            line += f"{took[rows]:16.1f} {took[rows] / took[1]:9.2f} {bound_ms[name][rows]:9.1f}  "
        print(line)
    data = {"benchmark": "passes", "setting": setting(exact), "read_ms": read_ms}
    data |= {"products_per_s": peaks, "took_ms": took_ms, "bound_ms": bound_ms}
    print(json.dumps(data))


class TimedPasses:
    """Passes over the newest tokens of a text, with the target's choices."""

    def __init__(self, target: Target) -> None:
        self._cache = KVCache(target)
        self._cache.reserve(1, 256)
        text_pass = target.text_pass()
        if text_pass is None:
            raise SystemExit("There are no kernels for this target here.")
        self._pass = text_pass

    def run(self, rows: int, token: int) -> float:
        """Seconds of a pass over this number of tokens."""
        slots = Slots(self._cache.data, [0], [100], 100 + rows)
        start = time.perf_counter()
        before = [i - 1 for i in range(rows)]
        self._pass.run([17 + token] * rows, before, slots, finished=rows, choices=rows)
        return time.perf_counter() - start


def num_weights(target: Target) -> int:
    """Weights that a pass multiplies each token with: those of all layers and of the head."""
    config = target.config
    head_dim, width = target.head_dim, int(config.hidden_size)
    attention = width * head_dim * 2 * (int(config.num_attention_heads) + target.num_kv_heads)
    layer = attention + 3 * width * int(config.intermediate_size)
    return int(target.num_layers * layer + target.vocab_size * width)


def read_speed() -> float:
    """Bytes a second that all threads read, of memory outside the caches."""
    numbers = torch.ones(2**28)
    return numbers.nbytes / least_s(numbers.sum)


def peak(kernels: str, instruction: str, products: int) -> float:
    """Products a second of one thread by an instruction on registers."""
    body = "".join(f"{instruction.format(i)}\\n" for i in range(INDEPENDENT))
    source = (
        'extern "C" void repeat(long count) {\n'
        f'  for (long i = 0; i < count; i++) asm volatile("{body}");\n}}\n'
    )
    with TemporaryDirectory() as directory:
        code, made = Path(directory) / "peak.cpp", Path(directory) / "peak.so"
        code.write_text(source)
        flags = (*FLAGS, *INSTRUCTIONS[kernels])
        command = [_compiler(), *flags, str(code), "-o", str(made)]
        subprocess.run(command, check=True)  # noqa: S603 - the kernels' compiler, our source
        library = ctypes.CDLL(str(made))
    took_s = least_s(lambda: library.repeat(ctypes.c_long(LOOPS)))
    return products * INDEPENDENT * LOOPS / took_s


def least_s(work: Callable[[], object]) -> float:
    """Least seconds of five runs."""
    took = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
    return min(took)


if __name__ == "__main__":
    main()
