"""The frozen target. The only room that imports transformers' models."""

from moaspec.target.families import SUPPORTED_FAMILIES
from moaspec.target.model import Target, WriteKV
from moaspec.target.registry import ALIASES, load_target

__all__ = ["ALIASES", "SUPPORTED_FAMILIES", "Target", "WriteKV", "load_target"]
