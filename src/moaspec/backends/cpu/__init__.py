"""Decoder layers, drafting and noise in C++, for CPUs with AVX512-BF16 or AVX2; see `cpp/`.

They are compiled at their first use and cached. If that is impossible, `build.why_not` says why,
and callers use PyTorch's operations.
"""
