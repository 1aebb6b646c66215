"""Mixture of Attentions speculative decoding: the target's text, exactly, only sooner."""

from moaspec_core import __version__ as __version__
from moaspec_core.support.lazy import attach

__getattr__, __all__ = attach(__name__)
