from moaspec.model.checkpoint.moa_checkpoint import load_checkpoint, save_drafter
from moaspec.model.checkpoint.published import save_published
from moaspec.model.moa import MoADrafter
from moaspec_core.checkpoint.drafter_config import DrafterConfig, LayerConfig, TargetIdentity

__all__ = [
    "DrafterConfig",
    "LayerConfig",
    "MoADrafter",
    "TargetIdentity",
    "load_checkpoint",
    "save_drafter",
    "save_published",
]
