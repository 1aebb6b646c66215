"""How the kernels are compiled, at the first use or into a wheel (hatch_build.py)."""

FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fopenmp", "-mfma")
"""`-fopenmp` finds the library that PyTorch has loaded: both then share one team of threads."""

_AVX512 = (*(f"-mavx512{name}" for name in ("f", "bw", "vl", "dq", "vnni", "bf16")), "-mf16c")
_AVX2 = ("-mavx2", "-mf16c")
INSTRUCTIONS = {
    "amx": (*_AVX512, "-mamx-tile", "-mamx-bf16"),
    "avx512": _AVX512,
    "avxvnni": (*_AVX2, "-mavxvnni"),
    "avx2": _AVX2,
}
"""Instruction sets that kernels are compiled for, the fastest first."""

COMPILERS = ("g++", "clang++", "c++")
