"""The frozen target. The only room that imports transformers' models."""

from moaspec.target.model import SUPPORTED_FAMILIES, Target, TargetPass, WriteKV
from moaspec.target.registry import ALIASES, load_target

__all__ = ["ALIASES", "SUPPORTED_FAMILIES", "Target", "TargetPass", "WriteKV", "load_target"]
