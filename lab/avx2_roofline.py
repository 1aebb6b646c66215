"""What bounds products with AVX2: reading weights, widening bf16, or the rate of multiplications.

    MOASPEC_KERNELS=avx2 python lab/avx2_roofline.py --threads 1 2

Times loops that only multiply, only read, or only widen, and the kernels' products with all
matrices of a pass of SmolLM2-135M (head included). Each figure is the least of
`--repeats` times, which other processes disturb least: CPU time of one thread, clock time of more.
"Cached" is the rate of products with a matrix in the core's own cache. The last line is JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from ctypes import byref, c_int32, c_int64, c_void_p
from pathlib import Path

import numpy as np

from moaspec.backends.cpu.build import SOURCES, library
from moaspec.backends.cpu.compiler_flags import FLAGS, INSTRUCTIONS
from moaspec.backends.cpu.structures import MatrixFacts

UNIT = """
#include "gemm.h"
#define TEAM _Pragma("omp parallel num_threads(threads)")
constexpr int kSums = 12, kStreams = 4;

// Products of registers alone: 2 * 8 * kSums operations a step and thread.
extern "C" void only_multiply(int64_t steps, int threads) {
  TEAM {
    __m256 sums[kSums], number = _mm256_set1_ps(0.5f);
    unrolled<kSums>([&](auto i) { sums[i] = number; });
    for (int64_t k = 0; k < steps; k++)
      unrolled<kSums>([&](auto i) {
        sums[i] = _mm256_fmadd_ps(sums[i], number, number);
        asm volatile("" : "+x"(sums[i]), "+x"(number));
      });
  }
}
// All bytes, `times` times, in as many streams as a product of one row; a register is a load.
template <class Use>
void read(const uint8_t* from, int64_t bytes, int64_t times, int threads, const Use& use) {
  TEAM {
    const Range mine = share_of(bytes / (64 * kStreams));
    const int64_t apart = 64 * (mine.stop - mine.start);
    for (int64_t time = 0; time < times; time++)
      for (int64_t i = 0; i < apart; i += 64)
        for (int stream = 0; stream < kStreams; stream++) {
          const uint8_t* line = from + mine.start * 64 * kStreams + stream * apart + i;
          __builtin_prefetch(line + 64 * kPrefetchPairs);
          use(words(line));
        }
  }
}
extern "C" void only_read(const uint8_t* from, int64_t bytes, int64_t times, int threads) {
  read(from, bytes, times, threads, [](Words both) {
    asm volatile("" ::"x"(both.part[0]), "x"(both.part[1]));
  });
}
extern "C" void only_widen(const uint8_t* from, int64_t bytes, int64_t times, int threads) {
  read(from, bytes, times, threads, [](Words both) {
    const Pairs wide = pairs(both);
    for (int i = 0; i < 2; i++) asm volatile("" ::"x"(wide.first[i]), "x"(wide.second[i]));
  });
}
"""
LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # outputs and inputs
SHAPES = (*LAYER * 30, (49152, 576))
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
CACHED = (512, 576)  # a matrix that a core's own cache holds
SUMS, ROWS_OF_TILE = 12, 6  # as `kSums` above and `kBf16Rows` of the kernels
STEPS, TIMES, PANEL = 2_000_000, 20_000, 576 * 32


def main() -> None:
    """Print the rates, then a table for each number of threads."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--threads", nargs="+", type=int, default=[1])
    options.add_argument("--repeats", type=int, default=15)
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        library = compiled(Path(folder))
    found = [measured(library, threads, args.repeats) for threads in args.threads]
    print(json.dumps({"benchmark": "avx2_roofline", "threads": found}))


def compiled(folder: Path) -> ctypes.CDLL:
    """The unit, with today's kernels."""
    (folder / "unit.cpp").write_text(UNIT)
    flags = [*FLAGS, *INSTRUCTIONS["avx2"], f"-I{SOURCES}"]
    command = ["g++", *flags, str(folder / "unit.cpp"), "-o", str(folder / "unit.so")]
    subprocess.run(command, check=True)  # noqa: S603 - a compiler and our own source
    return ctypes.CDLL(str(folder / "unit.so"))


def measured(loops: ctypes.CDLL, threads: int, repeats: int) -> dict[str, object]:
    """Rates, then milliseconds of a pass by its number of rows."""
    clock = time.thread_time if threads == 1 else time.perf_counter

    def least_s(run: Callable[..., object], *arguments: object) -> float:
        times = []
        for _ in range(1 + repeats):
            started = clock()
            run(*arguments, c_int32(threads))
            times.append(clock() - started)
        return min(times[1:])

    def products(matrices: Sequence[MatrixFacts], rows: int) -> float:
        x, out = np.full(rows * 1536, 0x3F80, np.uint16), np.zeros(rows * 49152, np.float32)
        inner = c_void_p(x.ctypes.data), c_int64(rows)

        def run(team: c_int32) -> None:
            for one in matrices:
                rest = (c_int64(one.inputs), c_void_p(out.ctypes.data), c_int32(1), team)
                library().moaspec_product(byref(one), *inner, *rest)

        return least_s(run)

    count = sum(outputs * inputs for outputs, inputs in SHAPES)
    weights = np.random.default_rng(0).integers(0x3C00, 0x3F00, count, np.uint16)  # 0.008 to 0.5
    at, num_bytes = weights.ctypes.data, weights.nbytes
    read_s = least_s(loops.only_read, c_void_p(at), c_int64(num_bytes), c_int64(1))
    few = (c_void_p(at), c_int64(threads * PANEL), c_int64(TIMES))
    rates = {
        "multiply": 2 * 8 * SUMS * STEPS * threads / least_s(loops.only_multiply, c_int64(STEPS)),
        "read": num_bytes / read_s,
        "widen": threads * PANEL * TIMES / least_s(loops.only_widen, *few),
    }
    print(
        f"{threads} threads:", ", ".join(f"{name} {x / 1e9:.1f} G/s" for name, x in rates.items())
    )
    print("| rows | read | widen | multiply | measured | over the bound | cached, G/s |")
    print("|---|---|---|---|---|---|---|")
    places = np.cumsum([0, *(2 * outputs * inputs for outputs, inputs in SHAPES)]).tolist()
    facts = [
        MatrixFacts(at + place, None, inputs, outputs, 16, 0)
        for place, (outputs, inputs) in zip(places, SHAPES, strict=False)
    ]
    outputs, inputs = CACHED
    cached = [MatrixFacts(at, None, inputs, threads * outputs, 16, 0)] * 200
    table = {}
    for rows in ROWS:
        tiles, flops = -(-rows // ROWS_OF_TILE), 2 * count * rows
        bounds = (read_s, tiles * num_bytes / rates["widen"], flops / rates["multiply"])
        spent_s = products(facts, rows)
        table[rows] = [1e3 * one for one in (*bounds, spent_s)]
        cells = [*(f"{one:.2f}" for one in table[rows]), f"{spent_s / max(bounds):.2f}"]
        speed = 2 * outputs * inputs * threads * rows * len(cached) / products(cached, rows) / 1e9
        print(f"| {rows} | {' | '.join(cells)} | {speed:.0f} |", flush=True)
    return {"threads": threads, "rates": rates, "milliseconds": table}


if __name__ == "__main__":
    main()
