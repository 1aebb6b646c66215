"""Drafting inside vLLM: an out-of-tree proposer for stock vLLM, never a patch.

vLLM keeps what is its own: batching, chunked prefill, prefix caching, verification, the server. It
is told of this package by five options, which `moaspec vllm-config` prints. `proposer` and its
neighbours are the only modules that import vLLM; `settings` can be used without it.
"""
