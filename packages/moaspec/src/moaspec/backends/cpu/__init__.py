"""Decoder layers, drafting and noise in C++, for CPUs with AVX512-BF16 or AVX2; see `cpp/`.

They are compiled at their first use and cached. Where that fails, `build.why_not` gives the
reason, and callers use PyTorch's operations.
"""
