"""The frozen target. The only package that imports transformers' models."""

from moaspec.support.lazy import attach

__getattr__, __all__ = attach(__name__)
