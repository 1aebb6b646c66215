"""Writing the two published forms, and what they cannot describe."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

import tiny
from golden import drafter as golden_drafter
from golden import needs_golden
from golden import target as golden_target
from moaspec.model.checkpoint.moa_checkpoint import load_checkpoint
from moaspec.model.checkpoint.published import Form, recorded, save_published
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_core.errors import CheckpointError
from moaspec_train.students.drafter_sizes import DrafterSizes, drafter_config

PUBLISHED_SIZES: dict[str, Any] = {"lsa_heads": 4}
"""The published rule gives every attention the target's number of heads."""


def write(drafter: MoADrafter, directory: Path, form: Form, of: Target) -> Path:
    save_published(drafter, directory, form, target=of.identity, context=of.config)
    return directory


def plain_target() -> Target:
    """K = 64 divides by the number of heads."""
    return tiny.fresh_target(num_attention_heads=4, hidden_size=64, num_key_value_heads=2)


@pytest.mark.parametrize("form", ["raw", "vllm"])
def test_what_is_written_reads_back_the_same(form: Form, tmp_path: Path) -> None:
    of = plain_target()
    drafter = tiny.random_drafter(of, **PUBLISHED_SIZES).to(torch.bfloat16)
    # Trained drafters record it; the forms have no place for it, and it is no size.
    drafter.config = dataclasses.replace(drafter.config, acceptance=((0.5, 0.2),))
    loaded = load_checkpoint(write(drafter, tmp_path, form, of), of.identity, of.config)
    for name, value in loaded.state_dict().items():
        assert_close(value, drafter.state_dict()[name], rtol=0, atol=0)
    assert loaded.config.target is None
    again = recorded(loaded, of.identity, 0)
    assert again.config == dataclasses.replace(drafter.config, acceptance=())


@needs_golden
@pytest.mark.parametrize("form", ["raw", "vllm"])
def test_the_references_own_checkpoint_survives(form: Form, tmp_path: Path) -> None:
    of = golden_target()
    (tmp_path / "in").mkdir()
    source = golden_drafter(tmp_path / "in", of)
    write(source, tmp_path / "out", form, of)
    before = load_file(tmp_path / "in" / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("form", ["raw", "vllm"])
def test_heads_that_the_forms_cannot_record(form: Form, tmp_path: Path) -> None:
    of = plain_target()
    drafter = tiny.random_drafter(of, lsa_heads=2)
    with pytest.raises(CheckpointError, match="layer_self_attention"):
        write(drafter, tmp_path, form, of)
    assert not list(tmp_path.iterdir())


def test_a_trimmed_vocabulary_and_several_exits(tmp_path: Path) -> None:
    of = plain_target()
    trimmed = tiny.random_drafter(of, draft_token_ids=torch.arange(9), **PUBLISHED_SIZES)
    several = MoADrafter(drafter_config(of, DrafterSizes(**PUBLISHED_SIZES), (0, 1)))
    for drafter in (trimmed, several):
        with pytest.raises(CheckpointError, match="published forms"):
            write(drafter, tmp_path, "raw", of)
