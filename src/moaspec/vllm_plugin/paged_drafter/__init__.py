"""The drafter, which reads vLLM's paged cache."""
