from moaspec.target.decoder_layers import WriteKV
from moaspec.target.names import ALIASES, SUPPORTED_FAMILIES
from moaspec.target.registry import target_facts
from moaspec.target.spec import TargetSpec
from moaspec.target.target import Target

__all__ = ["ALIASES", "SUPPORTED_FAMILIES", "Target", "TargetSpec", "WriteKV", "target_facts"]
