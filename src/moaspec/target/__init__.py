"""The frozen target. The only room that imports transformers' models."""

from moaspec.target.model import SUPPORTED_FAMILIES, Target, WriteKV
from moaspec.target.registry import ALIASES, load_target

__all__ = ["ALIASES", "SUPPORTED_FAMILIES", "Target", "WriteKV", "load_target"]
