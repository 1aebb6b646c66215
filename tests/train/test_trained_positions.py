"""A new drafter records how far into a text LSA was trained."""

from __future__ import annotations

import dataclasses

import pytest

import tiny
from moaspec.model.moa import MoADrafter
from moaspec.train.run_config import DrafterSizes, TrainConfig
from moaspec.train.students.students import unfilled_drafter


@pytest.mark.parametrize(
    ("family", "expected"),
    [("llama", 640), ("qwen3", 640), ("phi3", 0), ("gemma3_text", 0)],
)
def test_where_all_keys_rotate_alike(family: str, expected: int) -> None:
    """Phi-3 has LongRoPE, and Gemma 3 two kinds of rotary embeddings."""
    config = dataclasses.replace(
        TrainConfig(target="t", data=("responses.jsonl",), output="run", max_length=640),
        sizes=DrafterSizes(parameters=0),
    )
    drafter = unfilled_drafter(tiny.target(family), config, None)
    assert isinstance(drafter, MoADrafter)
    assert drafter.config.trained_positions == expected
