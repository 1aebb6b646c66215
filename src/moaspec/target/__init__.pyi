from moaspec.backends.fast_layers import WriteKV
from moaspec.target.names import ALIASES, SUPPORTED_FAMILIES
from moaspec.target.registry import chosen_dtype, load_target, target_facts
from moaspec.target.spec import TargetSpec
from moaspec.target.target import Target

__all__ = [
    "ALIASES",
    "SUPPORTED_FAMILIES",
    "Target",
    "TargetSpec",
    "WriteKV",
    "chosen_dtype",
    "load_target",
    "target_facts",
]
