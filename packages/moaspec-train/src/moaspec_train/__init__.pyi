from moaspec_train.dataset.examples import Example
from moaspec_train.dataset.read_examples import read_examples
from moaspec_train.parallelism import new_accelerator
from moaspec_train.reports.run_log import StepMetrics
from moaspec_train.run_config import TrainConfig, read_train_config
from moaspec_train.stopping import StopCause
from moaspec_train.students.drafter_sizes import DrafterSizes
from moaspec_train.students.losses import LossWeights
from moaspec_train.trainer import Trainer

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
