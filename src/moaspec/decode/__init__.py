"""Drafting, verification, and the engine that drives both."""

from moaspec.lazy import attach

__getattr__, __all__ = attach(__name__)
