"""A tiny target whose next token depends on the newest one only, which a drafter can learn."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import torch

import tiny
from moaspec.model.checkpoint.moa_checkpoint import save_drafter
from moaspec.target.target import Target
from moaspec_train.continual import LearnConfig
from moaspec_train.learning_process import LearningSettings

Text = tuple[tuple[int, ...], tuple[int, ...]]


@functools.cache
def target() -> Target:
    """Nobody changes it."""
    made = tiny.fresh_target(tokenizer=tiny.tokenizer())
    for layer in made.model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    return made


@functools.cache
def text_after(start: int) -> tuple[int, ...]:
    """What it writes after a token."""
    return tuple(tiny.own_text(target(), (start,)))


@functools.cache
def stream() -> tuple[Text, ...]:
    """Prompts and what it writes."""
    drawn = random.Random(0)
    prompts = [(drawn.randrange(tiny.VOCAB), drawn.randrange(tiny.VOCAB)) for _ in range(60)]
    return tuple((one, text_after(one[-1])) for one in prompts)


def saved_settings(directory: Path) -> LearningSettings:
    """Both on disk, and settings with which the drafter soon learns the rule."""
    of = target()
    of.model.save_pretrained(directory / "target")
    assert of.tokenizer is not None
    of.tokenizer.save_pretrained(directory / "target")
    return LearningSettings(
        target=str(directory / "target"),
        dtype="float32",
        initial=str(save_initial(directory / "initial")),
        directory=directory / "learned",
        config=LearnConfig(batch_size=4, steps=3, held_out=4, learning_rate=3e-3),
    )


def save_initial(directory: Path) -> Path:
    """A drafter that knows nothing of the rule."""
    save_drafter(tiny.random_drafter(target()), directory, dtype=torch.bfloat16)
    return directory
