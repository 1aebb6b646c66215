"""Mixture of Attentions speculative decoding: the target's text, exactly, only sooner."""

from moaspec_core.support.lazy import attach

__version__ = "0.1.0"

__getattr__, __all__ = attach(__name__)
