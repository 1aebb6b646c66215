from moaspec.train.dataset.examples import Example
from moaspec.train.dataset.read_examples import read_examples
from moaspec.train.parallelism import new_accelerator
from moaspec.train.reports.run_log import StepMetrics
from moaspec.train.run_config import TrainConfig, read_train_config
from moaspec.train.stopping import StopCause
from moaspec.train.students.drafter_sizes import DrafterSizes
from moaspec.train.students.losses import LossWeights
from moaspec.train.trainer import Trainer

__all__ = [
    "DrafterSizes",
    "Example",
    "LossWeights",
    "StepMetrics",
    "StopCause",
    "TrainConfig",
    "Trainer",
    "new_accelerator",
    "read_examples",
    "read_train_config",
]
