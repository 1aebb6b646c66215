"""Drafting inside vLLM: an out-of-tree proposer for an unmodified vLLM.

vLLM keeps batching, chunked prefill, prefix caching, verification and its server. Five options,
which `moaspec vllm-config` prints, make it load this package. `vllm_settings`, `hooks`, `refusals`,
`capture` and `vllm_target_layers` import nothing of vLLM.
"""
