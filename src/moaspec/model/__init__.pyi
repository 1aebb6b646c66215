from moaspec.model.checkpoint import load_checkpoint, save_drafter
from moaspec.model.config import DrafterConfig, LayerConfig, TargetIdentity
from moaspec.model.drafter import MoADrafter
from moaspec.model.published import save_published

__all__ = [
    "DrafterConfig",
    "LayerConfig",
    "MoADrafter",
    "TargetIdentity",
    "load_checkpoint",
    "save_drafter",
    "save_published",
]
