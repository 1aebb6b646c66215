from moaspec.decode.api import (
    Options,
    RowOptions,
    choices,
    generate,
    load_any_drafter,
    load_drafter,
    local_engine,
    local_parts,
    sampling_params,
    shaping_for,
    start,
    stream,
)
from moaspec.decode.bundled import bundled_drafters
from moaspec.decode.calibration import calibrate, stored_costs
from moaspec.decode.cost import CostTable
from moaspec.decode.engine import Engine
from moaspec.decode.hook import custom_generate
from moaspec.decode.lookup import PromptLookup
from moaspec.decode.protocols import Drafter
from moaspec.decode.replay import Replay
from moaspec.decode.result import Event, GenerationResult, Timing, acceptance_by_depth
from moaspec.decode.sampling import GREEDY, SamplingParams
from moaspec.decode.session import Session
from moaspec.decode.shaping import CostShape, FixedShape, ShapePolicy, Shaping
from moaspec.decode.tree import AUTO, Chain, Tree, parse_shape
from moaspec.target.rules import TokenRules

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
    "Options",
    "PromptLookup",
    "Replay",
    "RowOptions",
    "SamplingParams",
    "Session",
    "ShapePolicy",
    "Shaping",
    "Timing",
    "TokenRules",
    "Tree",
    "acceptance_by_depth",
    "bundled_drafters",
    "calibrate",
    "choices",
    "custom_generate",
    "generate",
    "load_any_drafter",
    "load_drafter",
    "local_engine",
    "local_parts",
    "parse_shape",
    "sampling_params",
    "shaping_for",
    "start",
    "stored_costs",
    "stream",
]
