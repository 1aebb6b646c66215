"""Measure speed, acceptance and equality of decoding methods."""

from moaspec_core.support.lazy import attach

__getattr__, __all__ = attach(__name__)
