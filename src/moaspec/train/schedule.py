"""What changes along a run: learning rate, curriculum, the part in which LSA stays frozen."""

from __future__ import annotations

import math

from moaspec.train.run_config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up to the peak, then a cosine down to `final_lr` of it."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    fall = config.decay_steps or config.steps - config.warmup_steps
    done = (step - config.warmup_steps) / max(1, fall)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return config.learning_rate * (config.final_lr + (1 - config.final_lr) * cosine)


def staircase_probability(config: TrainConfig, step: int) -> float:
    """Share of sequences whose SA sees its own block only: all at first, none after half."""
    return max(0.0, 1 - step / (config.steps / 2)) if config.staircase else 0.0


def lsa_is_frozen(config: TrainConfig, step: int) -> bool:
    """Whether LSA still keeps its initial weights; after the last step of a run, too, if it did."""
    return config.frozen_lsa == 1.0 or step < config.frozen_lsa * config.steps
