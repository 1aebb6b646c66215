"""The drafter over the blocks of vLLM's cache."""
