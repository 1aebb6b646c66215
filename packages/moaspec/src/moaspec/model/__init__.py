"""The drafter: its layers, its two halves, its checkpoints. Knows nothing of a target's code."""

from moaspec_core.support.lazy import attach

__getattr__, __all__ = attach(__name__)
