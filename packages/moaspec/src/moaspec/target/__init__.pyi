from moaspec.target.decoder_layers import WriteKV
from moaspec.target.registry import read_target_spec
from moaspec.target.spec import TargetSpec
from moaspec.target.target import Target
from moaspec_core.tokens.names import ALIASES, SUPPORTED_FAMILIES

__all__ = ["ALIASES", "SUPPORTED_FAMILIES", "Target", "TargetSpec", "WriteKV", "read_target_spec"]
