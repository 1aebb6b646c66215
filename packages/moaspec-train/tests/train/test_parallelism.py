"""Several processes, started as torchrun starts them, train what one trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import kill_training
import moaspec
import tiny
from free_port import free_port
from moaspec_core.errors import InputError
from moaspec_train.parallelism import new_accelerator, new_strategy
from moaspec_train.run_config import TrainConfig
from moaspec_train.training_state import StateFiles

STEPS = 4


def write_config(directory: Path, **changes: Any) -> Path:
    tiny.model().save_pretrained(directory / "target")
    texts = zip(tiny.PROMPTS, tiny.own_texts("llama"), strict=True)
    rows = [json.dumps({"prompt_ids": p, "response_ids": t}) for p, t in texts]
    (directory / "data.jsonl").write_text("\n".join(rows))
    settings: dict[str, Any] = {
        "target": str(directory / "target"),
        "data": [str(directory / "data.jsonl")],
        "held_out": 1,
        "batch_size": 2,
        "warmup_steps": 1,
        "save_every": 2,
        "threads": 1,
        "learning_rate": 4e-3,
        "activation_cache": False,
    }
    path = directory / "config.json"
    path.write_text(json.dumps(settings | changes))  # JSON is YAML
    return path


def train(
    config: Path, output: Path, *overrides: str, processes: int = 1, code: int = 0
) -> list[str]:
    """Run `moaspec train` in so many processes."""
    port = str(free_port())
    command = [sys.executable, "-m", "moaspec", "train", str(config), f"output={output}"]
    started = [
        subprocess.Popen(
            [*command, *overrides],
            env=os.environ
            | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(processes)
    ]
    outputs = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [code] * processes, outputs
    return outputs


def losses(output: Path) -> list[float]:
    lines = (output / "log.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.fixture(scope="module")
def of_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of one process."""
    directory = tmp_path_factory.mktemp("one")
    train(write_config(directory), directory / "run", f"steps={STEPS}")
    return directory / "run"


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_two_processes_give_the_loss_curve_of_one(
    sharding: str, of_one: Path, tmp_path: Path
) -> None:
    """With the same global batch; the last batch of an epoch has one row, so one process idles."""
    config, of_two = write_config(tmp_path), tmp_path / "two"
    train(config, of_two, f"steps={STEPS}", f"sharding={sharding}", processes=2)
    one, two = losses(of_one), losses(of_two)
    assert len(one) == STEPS
    # Gradients are summed in another order: float32 rounding, grown by a few steps of AdamW,
    # which divides tiny gradients by their own size.
    assert two == pytest.approx(one, rel=2e-3)
    loaded = [StateFiles(output / "state").load() for output in (of_one, of_two)]
    assert loaded[0] is not None
    assert loaded[1] is not None
    assert set(loaded[0][0]) == set(loaded[1][0])
    for name in (
        "model.encoder.projection.weight",
        "model.decoder.self_attention.mlp.up_proj.weight",
    ):
        # A step changes a weight by up to the learning rate of 4e-3, whatever its gradient's size.
        assert_close(loaded[0][0][name], loaded[1][0][name], rtol=0, atol=2e-3)
    moaspec.load_drafter(of_two / "drafter", target=tiny.target())


@pytest.mark.slow
def test_a_run_goes_on_with_other_processes(of_one: Path, tmp_path: Path) -> None:
    """One step in two processes, the next in one, the rest in two again."""
    config, moved = write_config(tmp_path), tmp_path / "moved"
    flags = (f"steps={STEPS}", "--for", "0.001s")
    train(config, moved, *flags, "sharding=fsdp", processes=2, code=75)
    assert len(losses(moved)) == 1
    train(config, moved, *flags, code=75)
    assert len(losses(moved)) == 2
    train(config, moved, f"steps={STEPS}", "sharding=fsdp", processes=2)
    # The same tolerance, for the same reason.
    assert losses(moved) == pytest.approx(losses(of_one), rel=2e-3)


def test_one_process_has_nobody_to_share_with(tmp_path: Path) -> None:
    config = TrainConfig(target="t", data=("d",), output=str(tmp_path), sharding="fsdp")
    with pytest.raises(InputError, match="several processes"):
        new_strategy(new_accelerator(config), torch.nn.Linear(1, 1), config)


def test_an_unknown_tracker_is_named(tmp_path: Path) -> None:
    config = TrainConfig(target="t", data=("d",), output=str(tmp_path), trackers=("nowhere",))
    with pytest.raises(InputError, match="nowhere"):
        new_accelerator(config)


@pytest.mark.parametrize("plugin", ["DeepSpeed", "FSDP"])
def test_plugins_of_the_launcher_are_refused(
    plugin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{plugin.upper()}", "true")
    config = TrainConfig(target="t", data=("d",), output=str(tmp_path))
    with pytest.raises(InputError, match=f"{plugin} plugin.*sharding=fsdp"):
        new_accelerator(config)


@pytest.mark.slow
def test_kill_9_at_ten_random_moments(tmp_path: Path) -> None:
    """The same weights, bit for bit, as an uninterrupted run, and one log row a step."""
    settings = {"steps": 60, "save_every": 1, "activation_cache": True}
    found: list[dict[str, Tensor]] = []
    for name, kills in (("whole", 0), ("killed", 10)):
        (tmp_path / name).mkdir()
        config = write_config(tmp_path / name, output=str(tmp_path / name / "run"), **settings)
        script = Path(kill_training.__file__)
        done = subprocess.run(
            [sys.executable, str(script), str(config), str(kills)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            capture_output=True,
            text=True,
            check=True,
        )
        values = json.loads(done.stdout.splitlines()[-1])
        state = StateFiles(tmp_path / name / "run" / "state").load()
        assert state is not None
        found.append(state[0])
        rows = (tmp_path / name / "run" / "log.jsonl").read_text().splitlines()
        assert [json.loads(row)["step"] for row in rows] == list(range(1, 61))
    assert values["hits"] == 10
    assert values["steps"] >= 3
    whole, killed = found
    assert whole.keys() == killed.keys()
    for key, value in whole.items():
        assert torch.equal(value, killed[key]), key
