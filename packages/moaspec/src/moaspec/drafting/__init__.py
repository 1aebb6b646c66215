"""Who proposes tokens: draft trees, proposers, and the KV cache that they share with the engine."""
