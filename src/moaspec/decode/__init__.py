"""Drafting, verification, and the engine that drives both."""

from moaspec.decode.api import (
    Options,
    RowOptions,
    bundled_drafters,
    choices,
    generate,
    load_any_drafter,
    load_drafter,
    local_engine,
    local_parts,
    sampling_params,
    start,
    stream,
)
from moaspec.decode.engine import Engine
from moaspec.decode.hook import custom_generate
from moaspec.decode.lookup import PromptLookup
from moaspec.decode.protocols import Drafter
from moaspec.decode.replay import Replay
from moaspec.decode.result import Event, GenerationResult, Timing, acceptance_by_depth
from moaspec.decode.sampling import GREEDY, SamplingParams
from moaspec.decode.session import Session
from moaspec.decode.tree import AUTO, Chain, Tree, parse_shape

__all__ = [
    "AUTO",
    "GREEDY",
    "Chain",
    "Drafter",
    "Engine",
    "Event",
    "GenerationResult",
    "Options",
    "PromptLookup",
    "Replay",
    "RowOptions",
    "SamplingParams",
    "Session",
    "Timing",
    "Tree",
    "acceptance_by_depth",
    "bundled_drafters",
    "choices",
    "custom_generate",
    "generate",
    "load_any_drafter",
    "load_drafter",
    "local_engine",
    "local_parts",
    "parse_shape",
    "sampling_params",
    "start",
    "stream",
]
