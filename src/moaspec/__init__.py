"""Mixture of Attentions speculative decoding: the target's text, exactly, only sooner."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
else:
    from importlib import import_module

    def __getattr__(name: str) -> object:
        """Load a name when it is first used: torch takes seconds, and a command can wait."""
        if name in ("decode", "errors", "hub", "model", "target"):
            return import_module(f"moaspec.{name}")
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = "target" if name in ("Target", "load_target") else "decode"
        globals()[name] = getattr(import_module(f"moaspec.{home}"), name)
        return globals()[name]


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
