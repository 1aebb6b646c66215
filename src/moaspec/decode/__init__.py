"""Drafting, verification, and the engine that drives both."""

from moaspec.decode.api import (
    bundled_drafters,
    choices,
    generate,
    load_drafter,
    local_engine,
    shaping_for,
    stream,
)
from moaspec.decode.calibrate import calibrate, stored_costs
from moaspec.decode.cost import CostTable
from moaspec.decode.engine import Engine
from moaspec.decode.lookup import PromptLookup
from moaspec.decode.protocols import Drafter
from moaspec.decode.replay import Replay
from moaspec.decode.result import Event, GenerationResult, Timing, acceptance_by_depth
from moaspec.decode.sampling import GREEDY, SamplingParams
from moaspec.decode.shaping import CostShape, FixedShape, ShapePolicy, Shaping
from moaspec.decode.tree import AUTO, Chain, Tree, parse_shape

__all__ = [
    "AUTO",
    "GREEDY",
    "Chain",
    "CostShape",
    "CostTable",
    "Drafter",
    "Engine",
    "Event",
    "FixedShape",
    "GenerationResult",
    "PromptLookup",
    "Replay",
    "SamplingParams",
    "ShapePolicy",
    "Shaping",
    "Timing",
    "Tree",
    "acceptance_by_depth",
    "bundled_drafters",
    "calibrate",
    "choices",
    "generate",
    "load_drafter",
    "local_engine",
    "parse_shape",
    "shaping_for",
    "stored_costs",
    "stream",
]
