"""Train drafters on the text and activations of a frozen target."""

from moaspec_core.support.lazy import attach

__getattr__, __all__ = attach(__name__)
