"""The drafter inside vLLM, which reads and writes vLLM's paged cache."""
