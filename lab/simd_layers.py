"""The kernels' products and attention with a SIMD layer in place of `simd_avx*.h`: bits, and speed.

    git clone --branch 1.4.0 https://github.com/google/highway
    taskset -c 1 python lab/simd_layers.py lab/simd_highway.h --include highway --mode avx2

Both are compiled, called in turns on one thread, and timed by the thread's CPU time, which leaves
out what other processes use. Weights of 80 MB are read in turns, so that none stay in a cache. A
line has the median of each, and of the ratios of neighbours. Exact weights of 4 and 8 bits and AMX
are left out.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from ctypes import byref, c_int64, c_void_p
from pathlib import Path
from statistics import median

import numpy as np

from moaspec.backends.cpu.build import SOURCES
from moaspec.backends.cpu.compiler_flags import FLAGS, INSTRUCTIONS
from moaspec.backends.cpu.structures import AttentionFacts, MatrixFacts

HIGHWAY = ("aes", "pclmul", "bmi", "bmi2", "lzcnt")
HIGHWAY_AVX512 = (
    *("avx512cd", "avx512vbmi", "avx512vbmi2", "avx512bitalg", "avx512vpopcntdq"),
    *("gfni", "vaes", "vpclmulqdq"),
)
"""Further instruction sets that Highway's targets ask for."""
UNIT = """
#include "attention.h"
extern "C" void product(const Matrix* matrix, const bf16* x, int64_t rows, float* out) {
  multiply(*matrix, x, rows, matrix->inputs, [&](int64_t row, int64_t output, Floats sums) {
    store(out + row * matrix->outputs + output, sums);
  });
}
extern "C" void attend_all(const Attention* call) { team_attend(*call); }
"""
SHAPES = ((1536, 576), (576, 1536), (49152, 576), (4096, 4096), (14336, 4096))
RING_BYTES = 80 << 20
BLOCK_BYTES = 4 * 16 + 32 * 16 // 2


def main() -> None:
    """Compile both, and compare them."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "layer", type=Path, help="header in place of simd_avx2.h and simd_avx512.h"
    )
    options.add_argument(
        "--include", type=Path, required=True, help="folder of the layer's headers"
    )
    options.add_argument("--mode", choices=("avx2", "avx512"), required=True)
    options.add_argument("--repeats", type=int, default=11)
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ours = compiled(Path(folder, "ours"), args.mode, None, args.include)
        theirs = compiled(Path(folder, "theirs"), args.mode, args.layer, args.include)
    compare_all(ours, theirs, args.repeats)


def compare_all(ours: ctypes.CDLL, theirs: ctypes.CDLL, repeats: int) -> None:
    """Print a line for each shape and number of rows."""
    for kind in ("bf16", "w4a8"):
        for outputs, inputs in SHAPES:
            for rows in (1, 4, 8, 16, 64):
                calls = [products(lib, kind, outputs, inputs, rows) for lib in (ours, theirs)]
                compare(f"{kind} {outputs}x{inputs}, {rows} rows", calls, repeats)
    for sizes in ((9, 3, 64), (32, 8, 128)):
        for slots in (200, 2000):
            for tokens in (1, 4, 8, 16):
                label = f"attention, {sizes[0]} heads, {slots} slots, {tokens} tokens"
                calls = [attention(lib, sizes, slots, tokens) for lib in (ours, theirs)]
                compare(label, calls, repeats)


def compiled(folder: Path, mode: str, layer: Path | None, include: Path) -> ctypes.CDLL:
    """The unit of today's sources, or of those with the layer."""
    shutil.copytree(SOURCES, folder)
    flags = [*FLAGS, *INSTRUCTIONS[mode]]
    gemm = folder / "gemm.h"
    gemm.write_text(gemm.read_text().replace("__AVX512BF16__", "MOASPEC_BLOCKS"))
    if layer:
        for name in ("simd_avx2.h", "simd_avx512.h"):
            shutil.copy(layer, folder / name)
        more = (*HIGHWAY, *(HIGHWAY_AVX512 if mode == "avx512" else ()))
        flags += [*(f"-m{name}" for name in more), "-DHWY_WANT_AVX3_ZEN4", f"-I{include}"]
    (folder / "unit.cpp").write_text(UNIT)
    began = time.perf_counter()
    command = ["g++", *flags, str(folder / "unit.cpp"), "-o", str(folder / "unit.so")]
    subprocess.run(command, check=True)  # noqa: S603 - a compiler and our own source
    print(f"compiled {folder.name} in {time.perf_counter() - began:.1f} s")
    return ctypes.CDLL(str(folder / "unit.so"))


Call = tuple[Callable[[int], object], np.ndarray, int]
"""What is called with 0, 1, ..., where its numbers go, and calls of a measurement."""


def products(lib: ctypes.CDLL, kind: str, outputs: int, inputs: int, rows: int) -> Call:
    """Products with matrices in turns."""
    rng = np.random.default_rng(0)
    if kind == "w4a8":
        blocks = outputs // 16 * inputs // 32
        panels = rng.integers(0, 256, (blocks, BLOCK_BYTES), dtype=np.uint8)
        scales = 0.01 * rng.standard_normal((blocks, 32))
        panels[:, :64] = scales.astype(np.float16).view(np.uint8)
    else:
        panels = bf16(rng, outputs * inputs)
    ring = [panels.copy() for _ in range(max(1, min(40, RING_BYTES // panels.nbytes)))]
    bits = 4 if kind == "w4a8" else 16
    facts = [MatrixFacts(one.ctypes.data, None, inputs, outputs, bits, bits == 4) for one in ring]
    x, out = bf16(rng, rows * inputs), np.zeros(rows * outputs, np.float32)

    def call(turn: int, _kept: object = (ring, x)) -> None:
        matrix = byref(facts[turn % len(facts)])
        lib.product(matrix, c_void_p(x.ctypes.data), c_int64(rows), c_void_p(out.ctypes.data))

    return call, out, max(1, min(40, int(16e6 / (outputs * inputs * max(4, rows)))))


def attention(lib: ctypes.CDLL, sizes: tuple[int, int, int], slots: int, tokens: int) -> Call:
    """Attention of a chain of tokens; `sizes` are heads, KV heads and numbers of a head."""
    heads, kv_heads, dim = sizes
    rng = np.random.default_rng(0)
    query, key, value = (
        bf16(rng, count * dim) for count in (tokens * heads, *2 * (kv_heads * slots,))
    )
    mask, out = np.ones((tokens, slots), np.uint8), np.zeros(query.size, np.uint16)
    mask[:, -tokens:] = np.tri(tokens)
    facts = AttentionFacts(
        *(query.ctypes.data, key.ctypes.data, value.ctypes.data, None, mask.ctypes.data),
        *(out.ctypes.data, 1, tokens, heads, kv_heads, dim, slots),
        *(tokens * heads * dim, heads * dim, dim, 0, slots * dim, dim, 0, slots * dim, dim),
        *(0, slots, dim**-0.5),
    )

    def call(_turn: int, _kept: object = (query, key, value, mask)) -> None:
        lib.attend_all(byref(facts))

    return call, out, max(1, int(2e7 / (tokens * heads * dim * slots)))


def bf16(rng: np.random.Generator, count: int) -> np.ndarray:
    """Normally distributed numbers."""
    return (rng.standard_normal(count, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def compare(label: str, calls: Sequence[Call], repeats: int) -> None:
    """Print whether the numbers are the same bits, and both times."""
    seconds: list[list[float]] = [[], []]
    for repeat in range(repeats + 2):
        for which in (0, 1) if repeat % 2 else (1, 0):
            call, _, count = calls[which]
            began = time.thread_time()
            for turn in range(count):
                call(turn)
            seconds[which].append((time.thread_time() - began) / count)
    of_ours, of_theirs = (found[2:] for found in seconds)
    for call, _, _ in calls:
        call(0)
    same = "same bits" if calls[0][1].tobytes() == calls[1][1].tobytes() else "OTHER BITS"
    ratio = median(b / a for a, b in zip(of_ours, of_theirs, strict=True))
    micros = (1e6 * median(of_ours), 1e6 * median(of_theirs))
    print(f"{label:50}{same:12}{micros[0]:10.1f} us{micros[1]:10.1f} us{ratio:8.3f}", flush=True)


if __name__ == "__main__":
    main()
