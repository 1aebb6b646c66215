"""The command `moaspec vllm-config`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

import tiny
from commands import Cli
from moaspec.model.baselines import EagleDrafter
from moaspec.model.checkpoint.baseline_checkpoint import save_baseline
from moaspec.model.checkpoint.moa_checkpoint import save_drafter
from moaspec_core.checkpoint.speculators_fields import Verifier
from moaspec_train.students.drafter_sizes import DrafterSizes, stack_config
from moaspec_vllm.vllm_settings import VLLMServeSettings


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


def test_target_and_length_of_speculators_config(cli: Cli, tmp_path: Path) -> None:
    verifier = Verifier(name="someone/model", draft_tokens=5)
    save_drafter(tiny.random_drafter(tiny.target()), tmp_path, verifier=verifier)
    arguments = json.loads(cli("vllm-config", str(tmp_path), "--json").out)
    assert arguments["model"] == "someone/model"
    assert arguments["speculative_config"]["num_speculative_tokens"] == 5


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


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--num-speculative-tokens", "0"), "1 to 16"),
        (("--num-speculative-tokens", "17"), "1 to 16"),
        (("--num-speculative-tokens", "1000"), "got num_speculative_tokens=1000"),
        (("--num-speculative-tokens", "three"), "valid integer"),
        (("--draft-up-to", "0"), "number of requests from 1 on, got 0"),
        (("--model", ""), "--model is empty"),
        (("--model", "no-such-model"), "no-such-model"),
        (("--port", "8000"), "--port"),
    ],
)
def test_no_command_is_printed_for_options_that_vllm_cannot_run(
    arguments: tuple[str, ...], named: str, cli: Cli, tmp_path: Path
) -> None:
    """`SERVE=$(moaspec vllm-config ...) && eval "$SERVE"` must not start half a command."""
    save_drafter(
        tiny.random_drafter(tiny.target()), tmp_path, training={"config": {"target": "a/model"}}
    )
    done = cli("vllm-config", str(tmp_path), *arguments)
    assert (done.code, done.out) == (2, "")
    assert named in " ".join(done.err.split())


def test_an_empty_drafter_is_not_the_working_directory(cli: Cli) -> None:
    done = cli("vllm-config", "")
    assert (done.code, done.out) == (2, "")
    assert "DRAFTER is empty" in done.err


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
