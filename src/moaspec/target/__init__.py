"""The frozen target. The only room that imports transformers' models."""

from moaspec.target.facts import TargetFacts
from moaspec.target.families import SUPPORTED_FAMILIES
from moaspec.target.lean import WriteKV
from moaspec.target.model import Target
from moaspec.target.registry import ALIASES, chosen_dtype, load_target, target_facts

__all__ = [
    "ALIASES",
    "SUPPORTED_FAMILIES",
    "Target",
    "TargetFacts",
    "WriteKV",
    "chosen_dtype",
    "load_target",
    "target_facts",
]
