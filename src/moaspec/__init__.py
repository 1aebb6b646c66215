"""Mixture of Attentions speculative decoding: the target's text, exactly, only sooner."""

from moaspec.decode import (
    Chain,
    Engine,
    Event,
    GenerationResult,
    PromptLookup,
    Replay,
    SamplingParams,
    Session,
    Tree,
    custom_generate,
    generate,
    load_drafter,
    stream,
)
from moaspec.target import Target, load_target

__version__ = "0.1.0"

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
    "Tree",
    "custom_generate",
    "generate",
    "load_drafter",
    "load_target",
    "stream",
]
