"""Training of drafters."""

from moaspec.lazy import attach

__getattr__, __all__ = attach(__name__)
