"""The benchmark of devices hands devices what a server would."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

import tiny
from moaspec.model.moa import MoADrafter

pytest.importorskip("onnxruntime", reason="moaspec-edge[export] is not installed")

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import device


def test_a_prompt_window_hides_nothing_from_a_device() -> None:
    drafter = tiny.random_drafter(tiny.target())
    made = MoADrafter(dataclasses.replace(drafter.config, prompt_window=4)).eval()
    key_1GCD, value_1GCD, *_ = device.features(tiny.target(), made, [*tiny.PROMPTS[2]])
    layer = drafter.config.cross_attention
    assert key_1GCD.shape == value_1GCD.shape == (1, layer.num_kv_heads, 12, layer.head_dim)
