"""Checkpoints through the package speculators 0.9 and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("speculators", reason="speculators is not installed: make test-speculators")

from speculators import (
    Eagle3SpeculatorConfig,
    SpeculatorModel,
    SpeculatorModelConfig,
    SpeculatorsConfig,
)
from torch import Tensor
from transformers import LlamaConfig

import tiny
from moaspec.generation.drafters import load_drafter
from moaspec.generation.speculators_type import register_speculators_type
from moaspec.model.checkpoint.baseline_checkpoint import save_baseline
from moaspec.model.checkpoint.moa_checkpoint import fingerprint, load_checkpoint, save_drafter
from moaspec.model.moa import MoADrafter
from moaspec_core.bundled import bundled_drafters
from moaspec_core.checkpoint.directory import read_config
from moaspec_core.checkpoint.speculators_fields import Verifier, speculators_fields
from moaspec_core.errors import InputError
from moaspec_train.run_config import TrainConfig
from moaspec_train.students.students import unfilled_drafter

OWN = Verifier(name="someone/model", architectures=("LlamaForCausalLM",), draft_tokens=4)
STOCK_FIELDS = {
    "architectures",
    "dtype",
    "model_type",
    "tie_word_embeddings",
    "transformers_version",
}
"""Fields of `config.json` that its `save_pretrained` writes by itself, or leaves out."""
FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"dtype": torch.bfloat16},
    "eight bits": {"int8": True},
    "shards": {"shard_bytes": 100_000},
}


def load(directory: Path) -> MoADrafter:
    target = tiny.target()
    return load_checkpoint(directory, target.identity, target.config)


def assert_equal(one: Tensor | None, other: Tensor | None) -> None:
    assert one is not None
    assert other is not None
    assert one.dtype == other.dtype
    assert torch.equal(one, other)


def test_its_config_classes_read_ours() -> None:
    """The section needs no type of ours: stock `SpeculatorsConfig` validates and repeats it."""
    for kind in ("moa", "eagle", "independent"):
        section = speculators_fields(OWN, kind)["speculators_config"]
        read = SpeculatorsConfig.model_validate(section)
        assert read.model_dump() == section
        assert (read.algorithm, read.verifier.name_or_path) == (kind, "someone/model")
        assert read.proposal_methods[0].speculative_tokens == 4


@pytest.mark.parametrize("form", FORMS)
def test_there_and_back(form: str, tmp_path: Path) -> None:
    register_speculators_type()
    drafter = tiny.random_drafter(tiny.target())
    drafter.draft_token_ids = torch.arange(3, 40)
    size = drafter.config.hidden_size
    drafter.head_moment = torch.eye(size) + 1e-2
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    save_drafter(drafter, ours, verifier=OWN, training={"steps": 3}, **FORMS[form])

    model = SpeculatorModel.from_pretrained(ours)
    config = SpeculatorModelConfig.from_pretrained(ours)
    assert type(config) is type(model.config)
    assert config.speculators_config.verifier.name_or_path == "someone/model"
    model.save_pretrained(theirs)

    before, after = load(ours), load(theirs)
    assert fingerprint(after) == fingerprint(before)
    assert after.config == before.config
    assert_equal(after.draft_token_ids, before.draft_token_ids)
    assert_equal(after.head_moment, before.head_moment)
    old, new = read_config(ours), read_config(theirs)
    differing = {name for name in old | new if old.get(name) != new.get(name)}
    assert differing <= STOCK_FIELDS
    # And once more through stock: what it wrote, it reads.
    assert SpeculatorModel.from_pretrained(theirs).config.moaspec == old["moaspec"]


def test_another_dtype(tmp_path: Path) -> None:
    """Its model is a module: what it converts is what it saves."""
    register_speculators_type()
    save_drafter(tiny.random_drafter(tiny.target()), tmp_path / "ours", verifier=OWN)
    model = SpeculatorModel.from_pretrained(tmp_path / "ours").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs")
    saved = load(tmp_path / "theirs")
    assert {one.dtype for one in saved.parameters()} == {torch.bfloat16}
    assert fingerprint(saved) == fingerprint(load(tmp_path / "ours"))


@pytest.mark.skipif(not bundled_drafters(), reason="no drafter is bundled")
@pytest.mark.slow
def test_bundled_drafters(tmp_path: Path) -> None:
    register_speculators_type()
    for name, directory in bundled_drafters().items():
        SpeculatorModel.from_pretrained(directory).save_pretrained(tmp_path / name)
        config = read_config(tmp_path / name)
        assert config["moaspec"] == read_config(directory)["moaspec"]
        assert config["training"] == read_config(directory)["training"]


def test_what_has_no_type_there(tmp_path: Path) -> None:
    """Its 0.9 has neither EAGLE 1 and 2 nor independent models, and says so."""
    kinds: Any = ("eagle", "independent")
    for kind in kinds:
        config = TrainConfig(target="tiny", data=(), output="", drafter=kind)
        drafter: Any = unfilled_drafter(tiny.target(), config, None)
        save_baseline(drafter, tmp_path / kind, verifier=OWN)
        with pytest.raises(NotImplementedError, match="unrecognized external format"):
            SpeculatorModel.from_pretrained(tmp_path / kind)


def test_its_own_types(tmp_path: Path) -> None:
    """What stock saves of another type is refused here by name."""
    section = SpeculatorsConfig.model_validate(
        speculators_fields(OWN)["speculators_config"] | {"algorithm": "eagle3"}
    )
    layer = LlamaConfig(hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=64)
    Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=32, speculators_config=section
    ).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="type 'eagle3' of speculators, with which vLLM drafts"):
        load_drafter(tmp_path, target=tiny.target())
