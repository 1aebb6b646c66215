"""A drafter records how far into a text LSA was trained."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import tiny
from moaspec.model.checkpoint.moa_checkpoint import save_drafter
from moaspec_train.dataset.examples import Example
from moaspec_train.run_config import TrainConfig
from moaspec_train.students.initial_drafter import load_initial_drafter
from moaspec_train.students.students import new_drafter

CONFIG = TrainConfig(target="t", data=("d",), output="run", max_length=64)


def examples(longest: int) -> list[Example]:
    return [Example((5, 9, 2), tuple(range(10, 10 + n - 3))) for n in (5, longest)]


@pytest.mark.parametrize(
    ("family", "expected"), [("llama", 40), ("qwen3", 40), ("phi3", 0), ("gemma3_text", 0)]
)
def test_the_longest_example_where_all_keys_rotate_alike(family: str, expected: int) -> None:
    """Phi-3 has LongRoPE, and Gemma 3 two kinds of rotary embeddings."""
    drafter = new_drafter(tiny.target(family), CONFIG, examples(40))
    assert drafter.config.trained_positions == expected
    assert (drafter.encoder.fold is None) == (expected == 0)


@pytest.mark.parametrize(("before", "expected"), [(20, 30), (40, 40), (0, 0)])
def test_training_goes_on(tmp_path: Path, before: int, expected: int) -> None:
    """Where nobody recorded a length, longer texts may have been trained before."""
    target = tiny.target()
    drafter = tiny.random_drafter(target)
    drafter.config = dataclasses.replace(drafter.config, trained_positions=before)
    save_drafter(drafter, tmp_path)
    config = dataclasses.replace(CONFIG, initial=str(tmp_path))
    again = load_initial_drafter(target, config, examples(30))
    assert again.config.trained_positions == expected
    assert again.encoder.fold is None or again.encoder.fold.trained == expected
