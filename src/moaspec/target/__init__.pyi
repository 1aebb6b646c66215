from moaspec.target.facts import TargetFacts
from moaspec.target.lean import WriteKV
from moaspec.target.model import Target
from moaspec.target.names import ALIASES, SUPPORTED_FAMILIES
from moaspec.target.registry import chosen_dtype, load_target, target_facts

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
