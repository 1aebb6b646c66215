"""Drafting, verification, and the engine that drives both."""

from moaspec.decode.api import (
    bundled_drafters,
    choices,
    generate,
    load_any_drafter,
    load_drafter,
    local_engine,
    stream,
)
from moaspec.decode.engine import Engine
from moaspec.decode.lookup import PromptLookup
from moaspec.decode.protocols import Drafter
from moaspec.decode.replay import Replay
from moaspec.decode.result import Event, GenerationResult, Timing, acceptance_by_depth
from moaspec.decode.sampling import GREEDY, SamplingParams
from moaspec.decode.tree import AUTO, Chain, Tree, parse_shape

__all__ = [
    "AUTO",
    "GREEDY",
    "Chain",
    "Drafter",
    "Engine",
    "Event",
    "GenerationResult",
    "PromptLookup",
    "Replay",
    "SamplingParams",
    "Timing",
    "Tree",
    "acceptance_by_depth",
    "bundled_drafters",
    "choices",
    "generate",
    "load_any_drafter",
    "load_drafter",
    "local_engine",
    "parse_shape",
    "stream",
]
