"""Targets in the fields of the package speculators: written, read back, contradicted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tiny
from moaspec.generation.drafters import read_drafter
from moaspec.model.checkpoint.baseline_checkpoint import load_baseline, read_whole, save_baseline
from moaspec.model.checkpoint.moa_checkpoint import load_checkpoint, save_drafter
from moaspec.target.registry import named_verifier
from moaspec_core.bundled import bundled_drafters
from moaspec_core.checkpoint.directory import read_config
from moaspec_core.checkpoint.speculators_fields import (
    Verifier,
    read_verifier,
    speculators_fields,
)
from moaspec_core.errors import CheckpointError, CorruptCheckpointError, InputError, MismatchError
from moaspec_core.tokens.names import ALIASES
from moaspec_train.run_config import TrainConfig
from moaspec_train.students.students import unfilled_drafter

OWN = Verifier(name="someone/model", architectures=("LlamaForCausalLM",), draft_tokens=4)


def test_the_fields() -> None:
    """Every one that speculators 0.9 asks for."""
    assert speculators_fields(OWN) == {
        "speculators_model_type": "moa",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "moa",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 4,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": "someone/model", "architectures": ["LlamaForCausalLM"]},
        },
    }
    assert read_verifier(speculators_fields(OWN)) == OWN
    assert "speculators_model_type" not in speculators_fields(OWN, "eagle")
    assert read_verifier(speculators_fields(OWN, "eagle"), "eagle") == OWN
    assert speculators_fields(None) == {}
    assert read_verifier({}) is None


def test_names_of_targets(tmp_path: Path) -> None:
    """A directory has no name that others could load."""
    config = SimpleNamespace(architectures=["Qwen2ForCausalLM"])
    alias = named_verifier("qwen2.5-coder-0.5b", config)
    assert (alias.name, alias.architectures) == (
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        ("Qwen2ForCausalLM",),
    )
    assert named_verifier(str(tmp_path), SimpleNamespace(architectures=None)) == Verifier(name=None)


def test_bundled_drafters_name_their_targets() -> None:
    for name, directory in bundled_drafters().items():
        verifier = read_verifier(read_config(directory))
        assert verifier is not None
        assert verifier.name == ALIASES[name.removesuffix("-n3")].hub_id


def test_read_back(tmp_path: Path) -> None:
    """A drafter loads as before; an error about another target names its own."""
    target, other = tiny.target(), tiny.target("qwen2")
    drafter = tiny.random_drafter(target)
    save_drafter(drafter, tmp_path / "named", verifier=OWN)
    save_drafter(drafter, tmp_path / "plain")
    named, plain = (
        load_checkpoint(tmp_path / one, target.identity, target.config)
        for one in ("named", "plain")
    )
    assert named.config == plain.config == drafter.config
    with pytest.raises(MismatchError, match=r"trained for \(someone/model\), or train"):
        load_checkpoint(tmp_path / "named", other.identity, other.config)


def without(config: dict[str, Any], name: str) -> None:
    del config["speculators_config"][name]


def changed(config: dict[str, Any], name: str, value: Any) -> None:
    config["speculators_config"][name] = value


def tokens(config: dict[str, Any], value: Any) -> None:
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = value


CONTRADICTIONS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "algorithm": (
        lambda config: changed(config, "algorithm", "eagle3"),
        r"kind 'moa', and speculators_config\.algorithm 'eagle3'",
    ),
    "type": (
        lambda config: config.update(speculators_model_type="dflash"),
        r"kind 'moa', and speculators_model_type 'dflash'",
    ),
}
DAMAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "no verifier": lambda config: without(config, "verifier"),
    "no methods": lambda config: without(config, "proposal_methods"),
    "an unknown method": lambda config: changed(config, "default_proposal_method", "beam"),
    "methods of another kind": lambda config: changed(config, "proposal_methods", "greedy"),
    "no tokens": lambda config: tokens(config, 0),
    "half a token": lambda config: tokens(config, 0.5),
    "no number of tokens": lambda config: tokens(config, True),
    "too many tokens": lambda config: tokens(config, 10**30),
    "a number as a name": lambda config: changed(
        config, "verifier", {"name_or_path": 3, "architectures": []}
    ),
    "no object": lambda config: config.update(speculators_config=[]),
}


def checkpoint(directory: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    save_drafter(tiny.random_drafter(tiny.target()), directory, verifier=OWN)
    config = read_config(directory)
    change(config)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_are_refused_by_name(name: str, tmp_path: Path) -> None:
    change, message = CONTRADICTIONS[name]
    directory, target = checkpoint(tmp_path, change), tiny.target()
    with pytest.raises(MismatchError, match=message):
        load_checkpoint(directory, target.identity, target.config)
    with pytest.raises(MismatchError, match=message):
        read_whole(directory)


@pytest.mark.parametrize("name", DAMAGE)
def test_damage(name: str, tmp_path: Path) -> None:
    directory, target = checkpoint(tmp_path, DAMAGE[name]), tiny.target()
    with pytest.raises(
        CorruptCheckpointError, match=r"speculators_config in config\.json is damaged"
    ):
        load_checkpoint(directory, target.identity, target.config)


def test_types_of_others(tmp_path: Path) -> None:
    """EAGLE-3, DFlash and so on: the message says where they can be used."""
    config = speculators_fields(OWN) | {"speculators_model_type": "eagle3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match="type 'eagle3' of speculators, with which vLLM drafts"):
        read_drafter(tmp_path, target=tiny.target())


@pytest.mark.parametrize("kind", ["eagle", "independent"])
def test_baselines(kind: Any, tmp_path: Path) -> None:
    target = tiny.target()
    drafter: Any = unfilled_drafter(
        target, TrainConfig(target="tiny", data=(), output="", drafter=kind), None
    )
    save_baseline(drafter, tmp_path, verifier=OWN)
    assert load_baseline(tmp_path, target.identity).config == drafter.config
    edited = read_config(tmp_path)
    edited["speculators_config"]["algorithm"] = "moa"
    (tmp_path / "config.json").write_text(json.dumps(edited))
    with pytest.raises(CheckpointError, match=rf"kind '{kind}', and .*algorithm 'moa'"):
        load_baseline(tmp_path, target.identity)
