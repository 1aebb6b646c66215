"""Schedules over a run: learning rate, staircase curriculum, frozen LSA."""

from __future__ import annotations

import math

from moaspec.train.run_config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up to the peak, then a cosine decay to `final_lr` times the peak."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    fall = config.decay_steps or config.steps - config.warmup_steps
    done = (step - config.warmup_steps) / max(1, fall)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return config.learning_rate * (config.final_lr + (1 - config.final_lr) * cosine)


def staircase_probability(config: TrainConfig, step: int) -> float:
    """Probability that SA sees its own block only: 1 at first, 0 from half of the run on."""
    return max(0.0, 1 - step / (config.steps / 2)) if config.staircase else 0.0


def lsa_is_frozen(config: TrainConfig, step: int) -> bool:
    """Whether LSA keeps its initial weights at this step."""
    return config.frozen_lsa == 1.0 or step < config.frozen_lsa * config.steps
