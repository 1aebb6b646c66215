"""Drafting, verification, and the engine that drives both."""

from moaspec.decode.api import bundled_drafters, generate, load_drafter, local_engine, stream
from moaspec.decode.engine import Engine
from moaspec.decode.result import Event, GenerationResult, Timing, acceptance_by_depth
from moaspec.decode.tree import AUTO, Chain, Tree, parse_shape

__all__ = [
    "AUTO",
    "Chain",
    "Engine",
    "Event",
    "GenerationResult",
    "Timing",
    "Tree",
    "acceptance_by_depth",
    "bundled_drafters",
    "generate",
    "load_drafter",
    "local_engine",
    "parse_shape",
    "stream",
]
