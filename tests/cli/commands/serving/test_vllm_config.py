"""The command `moaspec vllm-config`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import tiny
from commands import Cli
from moaspec.model.baselines import EagleDrafter
from moaspec.model.checkpoint.baseline_checkpoint import save_baseline
from moaspec.model.checkpoint.moa_checkpoint import save_drafter
from moaspec.train.students.drafter_sizes import DrafterSizes, stack_config
from moaspec.vllm_plugin.vllm_settings import VLLMServeSettings


def test_it_prints_a_command_that_a_shell_can_run(cli: Cli, tmp_path: Path) -> None:
    save_drafter(
        tiny.random_drafter(tiny.target()),
        tmp_path,
        training={"config": {"target": "someone/model"}},
    )
    done = cli("vllm-config", str(tmp_path), "--num-speculative-tokens", "2")
    serving = VLLMServeSettings(
        model="someone/model", drafter=str(tmp_path), num_speculative_tokens=2
    )
    assert done.code == 0
    assert shlex.split(done.out) == serving.command
    done = cli("vllm-config", str(tmp_path), "--model", "other/one", "--json")
    assert json.loads(done.out)["model"] == "other/one"


def test_a_drafter_that_records_no_target_needs_one(cli: Cli, tmp_path: Path) -> None:
    save_drafter(tiny.random_drafter(tiny.target()), tmp_path)
    done = cli("vllm-config", str(tmp_path))
    assert done.code == 2
    assert "--model" in done.err


def test_drafters_that_vllm_refuses_get_no_command(cli: Cli, tmp_path: Path) -> None:
    save_drafter(tiny.random_drafter(tiny.target(), exits=(2,)), tmp_path)
    done = cli("vllm-config", str(tmp_path), "--model", "some/model")
    assert done.code == 2
    assert "num_target_layers 2" in done.err
    baseline = EagleDrafter(stack_config(tiny.target(), DrafterSizes(), "eagle"))
    save_baseline(baseline, tmp_path / "eagle")
    done = cli("vllm-config", str(tmp_path / "eagle"), "--model", "some/model")
    assert done.code == 2
    assert "drafter=moa" in done.err


def test_a_target_of_other_sizes_is_refused(cli: Cli, tmp_path: Path) -> None:
    for name, vocab in (("own", tiny.VOCAB), ("other", tiny.VOCAB + 8)):
        tiny.model(vocab_size=vocab).save_pretrained(tmp_path / name)
    save_drafter(tiny.random_drafter(tiny.target()), tmp_path / "drafter")
    drafter, other = str(tmp_path / "drafter"), str(tmp_path / "other")
    assert cli("vllm-config", drafter, "--model", str(tmp_path / "own")).code == 0
    done = cli("vllm-config", drafter, "--model", other)
    assert done.code == 2
    assert "vocab_size" in done.err
    recorded = {"config": {"target": other}}
    save_drafter(tiny.random_drafter(tiny.target()), tmp_path / "drafter", training=recorded)
    assert cli("vllm-config", drafter).code == 2


def test_unknown_drafters_are_bad_input(cli: Cli) -> None:
    assert cli("vllm-config", "no-such-drafter").code == 2
