"""Is it faster here, and is it exactly right?"""

from moaspec.support.lazy import attach

__getattr__, __all__ = attach(__name__)
