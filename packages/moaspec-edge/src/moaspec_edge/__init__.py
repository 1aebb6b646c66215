"""Client-server: the decoder on the device, encoder and target on a server."""

from moaspec_core.support.lazy import attach

__getattr__, __all__ = attach(__name__)
