"""What breaks under a run: a clear message, the last state intact, the same weights afterwards."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import DistBackendError

import tiny
from moaspec_core.errors import InputError, TrainingError
from moaspec_train.dataset.examples import Example
from moaspec_train.run_config import TrainConfig
from moaspec_train.trainer import Trainer
from moaspec_train.training_state import StateFiles

EXAMPLES = [Example(p, t) for p, t in zip(tiny.PROMPTS, tiny.own_texts("llama"), strict=True)]


def trainer(output: Path, examples: list[Example] = EXAMPLES, **changes: Any) -> Trainer:
    values: dict[str, Any] = {
        "target": "tiny",
        "data": ("unused",),
        "output": str(output),
        "held_out": 1,
        "batch_size": 2,
        "steps": 5,
        "warmup_steps": 1,
        "save_every": 2,
        "activation_cache": False,
    }
    return Trainer(tiny.target(), examples, TrainConfig(**values | changes))


def weights(output: Path) -> dict[str, Tensor]:
    state = StateFiles(output / "state").load()
    assert state is not None
    return state[0]


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """The kernel refuses to let any file of this process grow further, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.AcceleratorError("CUDA error: device is lost\nCompile with ..."), "device is lost"),
        (DistBackendError("NCCL error: remote process exited"), "remote process exited"),
        (RuntimeError("[/gloo/tcp/pair.cc:537] Connection closed by peer"), "closed by peer"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried ..."), "smaller batches"),
    ],
    ids=["lost", "peer", "gloo", "memory"],
)
def test_a_device_that_disappears(
    error: Exception, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of step 4: the run goes on from step 2 and ends with the same weights."""
    trainer(tmp_path / "whole").run()
    run = trainer(tmp_path / "lost")
    real, passes = run.student.run, []

    def lose(*arguments: Any) -> Any:
        passes.append(run.step)
        if run.step == 3:
            raise error
        return real(*arguments)

    monkeypatch.setattr(run.student, "run", lose)
    save = run.states.save

    def save_slowly(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.2)  # the device is lost meanwhile
        return save(*arguments, **options)

    monkeypatch.setattr(run.states, "save", save_slowly)
    with pytest.raises(TrainingError, match=message) as caught:
        run.run()
    assert "step-2" in str(caught.value)
    assert "\n" not in str(caught.value)
    again = trainer(tmp_path / "lost")
    assert again.step == 2
    again.run()
    expected = weights(tmp_path / "whole")
    for name, tensor in weights(tmp_path / "lost").items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(("held_out", "told"), [(0, "step 4"), (1, "step-2")])
def test_a_full_disk_while_saving(held_out: int, told: str, tmp_path: Path) -> None:
    """The state of step 4, or the best weights, which are written before it."""
    run = trainer(tmp_path, held_out=held_out)
    for _ in range(2):
        run.train_step()
    run.save()
    with files_of_at_most(10_000), pytest.raises(TrainingError, match=told):
        run.run()
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["step-2"]
    again = trainer(tmp_path, held_out=held_out)
    assert again.step == 2
    again.run()
    assert again.step == 5


def test_a_full_disk_while_the_drafter_is_written(tmp_path: Path) -> None:
    trainer(tmp_path).run()
    again = trainer(tmp_path)
    with files_of_at_most(10_000), pytest.raises(TrainingError, match="step-5"):
        again.run()
    trainer(tmp_path).run()
    assert (tmp_path / "drafter" / "model.safetensors").exists()


@pytest.mark.parametrize("limit", [1_000, 20_000], ids=["at the start", "in a step"])
def test_a_full_disk_while_activations_are_kept(limit: int, tmp_path: Path) -> None:
    with files_of_at_most(limit), pytest.raises(TrainingError, match="Cannot keep activations"):
        trainer(tmp_path, activation_cache=True).run()
    trainer(tmp_path, activation_cache=True).run()


def test_three_examples_are_enough_and_fewer_say_so(tmp_path: Path) -> None:
    run = trainer(tmp_path / "three", EXAMPLES[:3])
    run.run()
    assert run.step == 5
    with pytest.raises(InputError, match=r"held_out=3.*give more data, or set held_out below 3"):
        trainer(tmp_path / "none", EXAMPLES[:3], held_out=3)


def test_a_run_with_a_cut_activation_file_ends_with_the_same_weights(tmp_path: Path) -> None:
    trainer(tmp_path / "whole", activation_cache=True).run()
    trainer(tmp_path / "cut", activation_cache=True, steps=2, decay_steps=4).run()
    for file in (tmp_path / "cut" / "activations").rglob("*.data"):
        file.write_bytes(file.read_bytes()[:1000])
    trainer(tmp_path / "cut", activation_cache=True).run()
    whole, cut = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    for name, tensor in whole.items():
        # Some CPUs round batches of other sizes in another way; zeros would be off by far more.
        torch.testing.assert_close(
            cut[name].float(), tensor.float(), rtol=0, atol=1e-4 * float(tensor.abs().max())
        )


def test_a_run_of_another_target_is_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path, steps=2)
    run.run()
    other = tiny.fresh_target()
    other.model.get_parameter("model.layers.0.mlp.down_proj.weight").mul_(1.5)
    with pytest.raises(InputError, match="a run with other target"):
        Trainer(other, EXAMPLES, run.config)
