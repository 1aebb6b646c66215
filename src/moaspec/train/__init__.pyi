from moaspec.train.config import DrafterSizes, TrainConfig, read_train_config
from moaspec.train.data import Example
from moaspec.train.losses import LossWeights
from moaspec.train.parallel import new_accelerator
from moaspec.train.progress import Progress
from moaspec.train.reading import read_examples
from moaspec.train.stopping import Ending
from moaspec.train.trainer import Trainer

__all__ = [
    "DrafterSizes",
    "Ending",
    "Example",
    "LossWeights",
    "Progress",
    "TrainConfig",
    "Trainer",
    "new_accelerator",
    "read_examples",
    "read_train_config",
]
