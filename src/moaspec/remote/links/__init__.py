"""Emulated links: what a network does to packets and messages, for tests and measurements."""

from moaspec.remote.links.link import PRESETS, Jitter, Link, link_named
from moaspec.remote.links.pacer import Pacer
from moaspec.remote.links.shaped import Faults, ShapedTransport

__all__ = ["PRESETS", "Faults", "Jitter", "Link", "Pacer", "ShapedTransport", "link_named"]
