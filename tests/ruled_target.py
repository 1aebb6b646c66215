"""A tiny target whose next token depends on the newest one only, which a drafter can learn."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import torch

import tiny
from moaspec.model.checkpoint.moa_checkpoint import save_drafter
from moaspec.target.target import Target

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


def save_initial(directory: Path) -> Path:
    """A drafter that knows nothing of the rule."""
    save_drafter(tiny.random_drafter(target()), directory, dtype=torch.bfloat16)
    return directory
