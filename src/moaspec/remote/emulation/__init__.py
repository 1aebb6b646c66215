"""Emulated links: what a network does to packets and messages, for tests and measurements."""

from moaspec.remote.emulation.link import PRESETS, Jitter, Link, link_named
from moaspec.remote.emulation.pacer import Pacer
from moaspec.remote.emulation.shaped import Faults, ShapedTransport

__all__ = ["PRESETS", "Faults", "Jitter", "Link", "Pacer", "ShapedTransport", "link_named"]
