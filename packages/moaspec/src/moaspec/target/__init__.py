"""The frozen target. The only package that imports transformers' models."""

from moaspec_core.support.lazy import attach

__getattr__, __all__ = attach(__name__)
