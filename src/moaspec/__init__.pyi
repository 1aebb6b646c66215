from moaspec import decode as decode
from moaspec import errors as errors
from moaspec import hub as hub
from moaspec import model as model
from moaspec import target as target
from moaspec.decode import (
    Chain,
    Engine,
    Event,
    GenerationResult,
    PromptLookup,
    Replay,
    SamplingParams,
    Session,
    TokenRules,
    Tree,
    custom_generate,
    generate,
    load_drafter,
    stream,
)
from moaspec.target import Target, load_target

__version__: str

__all__ = [
    "Chain",
    "Engine",
    "Event",
    "GenerationResult",
    "PromptLookup",
    "Replay",
    "SamplingParams",
    "Session",
    "Target",
    "TokenRules",
    "Tree",
    "custom_generate",
    "generate",
    "load_drafter",
    "load_target",
    "stream",
]
