"""Training data: reading, regeneration by the target, overlap with evaluation sets."""
