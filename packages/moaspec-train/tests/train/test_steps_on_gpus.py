"""What a step does on a GPU, counted on a CPU: waits, shapes, batches that are prepared ahead."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import tiny
from moaspec.model.moa import TargetEncoder
from moaspec_core.errors import TrainingError
from moaspec_train.accelerators import compile_mean
from moaspec_train.data_order import WIDTH, DataOrder, NextBatch, _padded, split_rows
from moaspec_train.dataset.examples import Example, map_tensors
from moaspec_train.run_config import TrainConfig
from moaspec_train.trainer import MOST_SKIPPED, Trainer

EXAMPLES = [Example(p, t) for p, t in zip(tiny.PROMPTS, tiny.own_texts("llama"), strict=True)]


def config(output: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        **{"target": "tiny", "data": ("unused",), "output": str(output), "held_out": 0},
        **{"steps": 20, "batch_size": 2, "warmup_steps": 1, "activation_cache": False},
        "warm_start": False,
    }
    return TrainConfig(**values | changes)


def trainer(output: Path, **changes: Any) -> Trainer:
    return Trainer(tiny.target(), EXAMPLES, config(output, **changes))


@pytest.mark.parametrize(
    "changes", [{}, {"activation_cache": True}, {"frozen_lsa": 1.0}, {"num_target_layers": (0, 1)}]
)
def test_more_pads_change_nothing(changes: dict[str, Any], tmp_path: Path) -> None:
    """GPUs get rows of few different lengths, also where activations come from the disk."""
    run = trainer(tmp_path, batch_size=3, **changes)
    plain = run.data.next_batch(0)
    few_shapes = map_tensors(plain, lambda x: _padded(x) if x.ndim == 2 else x)
    assert few_shapes.batch.input_ids_BT.shape[1] % WIDTH == 0
    found, expected = (
        run.student.run(run.strategy.model, part, 0).exits for part in (few_shapes, plain)
    )
    for one, other in zip(found, expected, strict=True):
        assert_close(one.drafted_ME, other.drafted_ME)
        assert_close(one.target_ME, other.target_ME)


class Waits(TorchDispatchMode):
    """Counts operations for which the host waits for a GPU that has their input."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "item")

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        is_mask = name in ("index", "index_put", "index_put_") and any(
            isinstance(one, Tensor) and one.dtype == torch.bool for one in args[1]
        )
        if name in self.NAMES or is_mask:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_target_layers": (0, 1)},
        {"drafter": "eagle"},
        {"drafter": "independent"},
        {"optimizer": "muon", "average_steps": 10, "staircase": True},
    ],
)
@pytest.mark.parametrize("rows", [1, 4])
def test_a_step_waits_once_whatever_its_size(
    rows: int, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its sums and the gradients' norm, which are read together."""
    run = trainer(tmp_path, batch_size=rows, pass_tokens=1, **changes)
    to_list = Tensor.tolist
    batch = run._next.take(0)  # found on the CPU, in a thread
    monkeypatch.setattr(run._next, "take", lambda _: batch)
    for optimizer in run.strategy.optimizers:
        # AdamW keeps its number of steps on the CPU, and reads it there.
        monkeypatch.setattr(optimizer, "step", lambda: None)
    read: list[Tensor] = []  # by `tolist`, which is no operation

    def tolist(values: Tensor) -> Any:
        read.append(values)
        return to_list(values)

    monkeypatch.setattr(Tensor, "tolist", tolist)
    with Waits() as waits:
        run.train_step()
    assert not waits.counts
    assert [len(values) for values in read] == [6]


def test_a_batch_that_is_prepared_ahead_is_the_same(tmp_path: Path) -> None:
    """Also where the order is saved in between, or examples are added."""
    settings = config(tmp_path, staircase=True)
    plain, ahead = (DataOrder(EXAMPLES, settings) for _ in range(2))
    batches = NextBatch(ahead, lambda whole: whole, ahead=True)
    for step in range(9):
        expected, found = plain.next_batch(step), batches.take(step)
        assert found.batch.example_ids == expected.batch.example_ids
        assert torch.equal(found.blocks.last_verified_BT, expected.blocks.last_verified_BT)
        assert found.staircase_B is not None
        if step in (2, 5):
            batches.give_back()
            assert ahead.state() == plain.state()
        if step == 5:
            for order in (plain, ahead):
                order.add([Example((1, 2), (3, 4, 5))])


def test_batches_that_are_not_finite_are_skipped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few in a row end the run; what was skipped is in the log and survives a restart."""
    run = trainer(tmp_path, steps=3, save_every=1)
    real, calls = run.strategy.backward, [0]

    def broken(loss: Tensor) -> None:
        calls[0] += 1
        real(loss * (math.nan if calls[0] in (2, 3) else 1.0))

    monkeypatch.setattr(run.strategy, "backward", broken)
    run.run()
    assert [row["skipped"] for row in run.log.rows()] == [0, 2, 2]
    assert all(math.isfinite(row["loss"]) for row in run.log.rows())
    again = trainer(tmp_path, steps=4)
    assert (again.step, again.skipped) == (3, 2)
    before = again.strategy.state()
    monkeypatch.setattr(again.strategy, "backward", lambda loss: real(loss * math.nan))
    monkeypatch.setattr(again.strategy, "clipped", lambda _: torch.tensor(math.nan))
    with pytest.raises(TrainingError, match=f"for {MOST_SKIPPED} batches in a row"):
        again.train_step()
    after = again.strategy.state()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_the_last_states_are_kept(tmp_path: Path) -> None:
    """A run goes on from the last one that is there."""
    trainer(tmp_path, steps=5, save_every=1, keep_states=2).run()
    states = sorted(path.name for path in (tmp_path / "state").iterdir())
    assert states == ["step-4", "step-5"]
    for path in (tmp_path / "state/step-5").iterdir():
        path.unlink()
    (tmp_path / "state/step-5").rmdir()
    assert trainer(tmp_path, steps=5).step == 4


def test_facts_of_a_step_are_in_the_log(tmp_path: Path) -> None:
    run = trainer(tmp_path, batch_size=4, steps=2, learning_rate=4e-3, warmup_steps=2)
    run.run()
    first, second = run.log.rows()
    assert (first["learning_rate"], second["learning_rate"]) == (2e-3, 4e-3)
    assert first["gradient_norm"] > 0
    assert 0 <= first["padding"] < 1
    assert 0 < first["memory_gb"] <= second["memory_gb"]


def test_a_state_is_written_while_training_goes_on(tmp_path: Path) -> None:
    """It is the state of its step, and not a later one's."""
    one, other = trainer(tmp_path / "a"), trainer(tmp_path / "b")
    for run in (one, other):
        run.train_step()
    other.save()
    one.save(wait=False)
    one.train_step()
    one.wait_for_save()
    found, expected = (run.states.load() for run in (one, other))
    assert found is not None
    assert expected is not None
    assert all(torch.equal(found[0][name], value) for name, value in expected[0].items())
    assert found[1] == expected[1]


@pytest.mark.parametrize(("lengths", "number", "largest"), [
    ([1, 1, 1, 1, 4], 2, 4),
    ([5, 5, 5, 5], 2, 10),
    ([1, 2, 3, 10], 3, 10),
    ([3, 3, 3], 5, 3),
    ([2], 3, 2),
])  # fmt: skip
def test_passes_have_similar_sizes(lengths: list[int], number: int, largest: int) -> None:
    groups = split_rows(range(len(lengths)), lengths, number)
    assert len(groups) == number
    assert [row for group in groups for row in group] == list(range(len(lengths)))
    assert max(len(g) * max(lengths[row] for row in g) for g in groups if g) == largest


def test_a_compiled_lsa_has_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """By chunks of one size, the last one padded."""
    monkeypatch.setattr("moaspec_train.accelerators.CHUNK", 8)
    target = tiny.target()
    encoder = tiny.random_drafter(target).encoder.requires_grad_()
    sizes: list[int] = []

    def noted(function: Any, *, dynamic: bool) -> Any:
        assert not dynamic

        def call(chunk: Tensor) -> Any:
            sizes.append(len(chunk))
            return function(chunk)

        return call

    ids = torch.arange(22).reshape(2, 11)
    kv = target.capture(ids, torch.ones_like(ids)).kv_BTLK
    results = []
    for mean in (compile_mean(encoder, noted), encoder.mean_over_layers):
        encoder.zero_grad()
        means = mean(kv)
        (means * torch.linspace(-1, 1, means.numel()).view_as(means)).sum().backward()
        gradients = [p.grad.clone() for p in encoder.parameters() if p.grad is not None]
        results.append((means.detach(), gradients))
    assert sizes == [8, 8, 8]
    assert_close(results[0], results[1])
    with torch.no_grad():
        assert_close(compile_mean(encoder, noted)(kv), TargetEncoder.mean_over_layers(encoder, kv))
    assert sizes == [8, 8, 8]
