"""Drafting inside vLLM: an out-of-tree proposer for an unmodified vLLM.

vLLM keeps batching, chunked prefill, prefix caching, verification and its server. Four options,
which `moaspec vllm-config` prints, make it load this package. `vllm_settings`, `hooks`, `refusals`,
`load_aware`, and `cache_reader`, `encoded_tokens` and `vllm_target_layers` of `paged_drafter`
import nothing of vLLM.
"""
