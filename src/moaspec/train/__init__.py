"""Training of drafters."""

from moaspec.train.config import DrafterSizes, TrainConfig, read_train_config
from moaspec.train.data import Example
from moaspec.train.losses import LossWeights
from moaspec.train.reading import read_examples
from moaspec.train.trainer import Progress, Trainer

__all__ = [
    "DrafterSizes",
    "Example",
    "LossWeights",
    "Progress",
    "TrainConfig",
    "Trainer",
    "read_examples",
    "read_train_config",
]
