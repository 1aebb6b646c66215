"""The training loop: it learns, resumes exactly, and writes what drafts."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
import shlex
import signal
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import pytest
import torch
import typer
import yaml
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

import moaspec
import tiny
from block_drafts import block_logits
from moaspec.backends import linear_backends
from moaspec.backends.fast_moa_proposer import FastMoAProposer
from moaspec.engine.local_verifier import LocalVerifier
from moaspec.generation.drafters import load_any_drafter
from moaspec.model.checkpoint.published import save_published
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_core.checkpoint.directory import read_config
from moaspec_core.cli.main import app
from moaspec_core.drafting.protocols import RequestText, VerifyRequest
from moaspec_core.engine.engine import run_now
from moaspec_core.errors import InputError, TrainingError
from moaspec_train.dataset.examples import Example, response_counts
from moaspec_train.reports.run_log import BestStep, StepMetrics
from moaspec_train.reports.run_notes import emulation, setting_notes
from moaspec_train.run_config import TrainConfig, learning_rate, staircase_probability
from moaspec_train.stopping import StopCause
from moaspec_train.students.drafter_sizes import DrafterSizes
from moaspec_train.students.held_out import BLOCK_LENGTH, NUM_RANKS, HeldOutMetrics
from moaspec_train.students.losses import Divergence, LossWeights
from moaspec_train.students.students import (
    DraftVocabularyHead,
    MoAStudent,
    StudentOutput,
    new_drafter,
)
from moaspec_train.trainer import Trainer

pytestmark = pytest.mark.essential

EXAMPLES = [Example(p, t) for p, t in zip(tiny.PROMPTS, tiny.own_texts("llama"), strict=True)]


def settings(output: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "target": "tiny",
        "data": ("unused",),
        "output": str(output),
        "held_out": 1,
        "batch_size": 2,
        "steps": 4,
        "warmup_steps": 2,
        "learning_rate": 4e-3,
        "shortest_block": 3,
        "longest_block": 7,
        "save_every": 2,
    }
    return TrainConfig(**values | changes)


def trainer(output: Path, **changes: Any) -> Trainer:
    return Trainer(tiny.target(), EXAMPLES, settings(output, **changes))


def module(run: Trainer) -> MoADrafter:
    assert isinstance(run.student, MoAStudent)
    return run.student.module


def vocabulary(run: Trainer) -> list[int]:
    ids = run.student.draft_token_ids
    assert ids is not None
    return ids.tolist()


@pytest.mark.slow
def test_it_learns_short_examples_by_heart_and_the_export_drafts(tmp_path: Path) -> None:
    seen: list[StepMetrics] = []
    run = trainer(
        tmp_path,
        held_out=0,
        batch_size=4,
        steps=120,
        save_every=60,
        loss=LossWeights(feature=0.1, kl=1.0),
    )
    run.run(seen.append)
    assert [progress.step for progress in seen] == list(range(1, 121))
    assert seen[-1].kl < seen[0].kl / 4
    assert seen[-1].accuracy > 0.8
    drafter = moaspec.load_drafter(tmp_path / "drafter", target=tiny.target())
    results = moaspec.generate(
        tiny.target(),
        tiny.PROMPTS,
        drafter=drafter,
        max_new_tokens=tiny.NEW_TOKENS,
        tree=moaspec.Chain(3),
    )
    assert [tuple(result.token_ids) for result in results] == list(tiny.own_texts("llama"))
    rounds = sum(result.num_rounds for result in results)
    assert sum(sum(result.accept_lengths) for result in results) / rounds > 1.5


def test_what_a_run_writes(tmp_path: Path) -> None:
    run = trainer(tmp_path, steps=5)
    run.run()
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in log] == [1, 2, 3, 4, 5]
    assert [bool(row["held_out_accuracy"]) for row in log] == [False, True, False, True, True]
    assert all(len(row["held_out_accuracy"] or [0] * 8) == BLOCK_LENGTH for row in log)
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert config["training"]["steps"] == 5
    assert config["training"]["config"]["seed"] == 0
    (by_rank,) = config["moaspec"]["acceptance"]
    assert len(by_rank) == NUM_RANKS
    assert 0 <= sum(by_rank) <= 1
    accuracy = log[-1]["held_out_accuracy"]
    assert min(accuracy) <= by_rank[0] <= max(accuracy)  # the mean over all draft steps
    trainer(tmp_path, steps=5).run()  # finished: it measures nothing and writes the drafter again
    again = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert again["moaspec"]["acceptance"] == [by_rank]
    drafter = moaspec.load_drafter(tmp_path / "drafter", target=run.target)
    assert drafter.head_moment is not None
    measured = run.measure()[0].moment_EE
    assert measured is not None
    assert torch.equal(drafter.head_moment, measured)
    assert not list(tmp_path.rglob("*partial*"))


def test_trackers(tmp_path: Path) -> None:
    """What TensorBoard reads back is what the log says."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = trainer(tmp_path, steps=2, trackers=("tensorboard",))
    run.run()
    events = EventAccumulator(str(next(tmp_path.glob("moaspec/events*"))))
    events.Reload()
    rows = run.log.rows()
    for name in ("loss", "accuracy"):
        told = [event.value for event in events.Scalars(name)]
        assert told == pytest.approx([row[name] for row in rows])
    (tau,) = events.Scalars("held_out_tau/N0")
    assert tau.value == pytest.approx(rows[-1]["held_out_tau"]["0"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"staircase": True},
        {"activation_cache": False, "batch_size": 1},
        {"frozen_lsa": 0.3},
        {"frozen_lsa": 0.8},
        {"loss": LossWeights(divergence="hybrid")},
        {"optimizer": "muon"},
        {"average_steps": 3},
    ],
    ids=str,
)
def test_resume_is_exact(changes: dict[str, Any], tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", steps=8, **changes)
    whole.run()
    cut = trainer(tmp_path / "cut", steps=8, **changes)
    for _ in range(5):
        cut.train_step()
        if cut.step % 2 == 0:
            cut.save()
    resumed = trainer(tmp_path / "cut", steps=8, **changes)
    assert resumed.step == 4
    resumed.run()
    state = module(whole).state_dict()
    for name, value in module(resumed).state_dict().items():
        assert_close(value, state[name], rtol=0, atol=0)
    assert resumed.tokens == whole.tokens
    exported = [load_file(tmp_path / run / "drafter/model.safetensors") for run in ("whole", "cut")]
    for name, value in exported[0].items():
        assert_close(exported[1][name], value, rtol=0, atol=0)


def test_an_average_is_measured_and_exported_and_the_run_goes_on_from_its_last_weights(
    tmp_path: Path,
) -> None:
    plain, run = trainer(tmp_path / "plain"), trainer(tmp_path / "a", average_steps=2)
    for _ in range(3):
        plain.train_step()
        run.train_step()
    before = run.measure()
    run.export()
    for name, value in module(plain).named_parameters():
        assert torch.equal(module(run).get_parameter(name), value), name
    plain.export()
    last, averaged = (
        load_file(tmp_path / run / "drafter/model.safetensors") for run in ("plain", "a")
    )
    assert any(not torch.equal(averaged[name], value) for name, value in last.items())
    with torch.no_grad():
        for parameter in module(run).parameters():
            parameter.zero_()
    moments = [found[0].moment_EE for found in (run.measure(), before)]
    assert_close(*moments, rtol=0, atol=0)


def test_muon_trains_matrices_and_adamw_the_rest(tmp_path: Path) -> None:
    run = trainer(tmp_path, optimizer="muon")
    run.train_step()
    for name, parameter in module(run).named_parameters():
        kinds = run.strategy.moments(parameter).keys()
        assert ("momentum_buffer" in kinds) == (parameter.ndim == 2), name
        assert ("exp_avg" in kinds) == (parameter.ndim != 2), name


def test_a_run_goes_on_with_its_optimiser_only(tmp_path: Path) -> None:
    trainer(tmp_path).run()
    with pytest.raises(InputError, match="other optimizer"):
        trainer(tmp_path, optimizer="muon")


def test_a_finished_run_only_exports(tmp_path: Path) -> None:
    trainer(tmp_path).run()
    seen: list[StepMetrics] = []
    trainer(tmp_path).run(seen.append)
    assert seen == []


def test_the_cache_changes_little(tmp_path: Path) -> None:
    """Losses agree to bf16's rounding of the activations: 8 bits, so about a percent."""
    with_cache = trainer(tmp_path / "a").train_step()
    without = trainer(tmp_path / "b", activation_cache=False).train_step()
    assert with_cache.total == pytest.approx(without.total, rel=0.02)
    assert with_cache.count == without.count


def test_a_frozen_lsa_waits_for_its_share_of_the_steps(tmp_path: Path) -> None:
    run = trainer(tmp_path, frozen_lsa=0.5)
    lsa = module(run).encoder.layer_self_attention
    before = {name: value.clone() for name, value in lsa.state_dict().items()}
    states = []
    for _ in range(4):
        run.train_step()
        states.append(all(torch.equal(lsa.state_dict()[name], before[name]) for name in before))
    assert states == [True, True, False, False]


def test_the_warm_start_reads_each_example_once_and_tells_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("moaspec_train.progress.REPORT_EVERY_S", 0.0)
    capture = Mock(side_effect=Target.capture)
    monkeypatch.setattr(
        Target, "capture", lambda self, *rest, **named: capture(self, *rest, **named)
    )
    with caplog.at_level("INFO"):
        run = trainer(tmp_path, frozen_lsa=1.0)
    assert capture.call_count == len(run.data.train_ids)
    total = sum(len(run.data.examples[i]) for i in run.data.train_ids)
    pattern = re.compile(rf"Read \d+ of {total} tokens, \d+ s left")
    found = [text for text in caplog.messages if pattern.fullmatch(text)]
    assert len(found) == len(run.data.train_ids) - 1


def test_stored_means_change_little(tmp_path: Path) -> None:
    """The first loss agrees to the rounding of means and states to bf16."""
    frozen = trainer(tmp_path / "a", frozen_lsa=1.0).train_step()
    free = trainer(tmp_path / "b").train_step()
    assert frozen.total == pytest.approx(free.total, rel=0.02)


def test_a_frozen_lsa_serves_reused_layers_too(tmp_path: Path) -> None:
    """The first loss agrees to the rounding of means and states to bf16; then LSA stays."""
    changes = {"num_target_layers": (0, 2), "activation_cache": False}
    run = trainer(tmp_path / "a", frozen_lsa=1.0, **changes)
    lsa = module(run).encoder.layer_self_attention
    before = {name: value.clone() for name, value in lsa.state_dict().items()}
    frozen = run.train_step()
    free = trainer(tmp_path / "b", **changes).train_step()
    assert frozen.total == pytest.approx(free.total, rel=0.02)
    assert all(torch.equal(lsa.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize("layers", [(0,), (1,), (0, 2)])
def test_with_a_frozen_lsa_the_target_runs_once_for_every_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: tuple[int, ...]
) -> None:
    run = trainer(tmp_path, frozen_lsa=1.0, num_target_layers=layers)
    assert not (tmp_path / "activations").exists()  # the means are enough
    capture = Mock(wraps=run.target.capture)
    monkeypatch.setattr(run.target, "capture", capture)
    for _ in range(-(-len(run.data.train_ids) // run.config.batch_size)):
        run.train_step()
    assert capture.call_count > 0
    capture.reset_mock()
    run.train_step()
    assert capture.call_count == 0


def test_measuring_after_the_last_step_reads_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an LSA that never learns, the target once read all held-out answers again."""
    run = trainer(tmp_path, frozen_lsa=1.0, activation_cache=False)
    run.measure()
    capture = Mock(wraps=run.target.capture)
    monkeypatch.setattr(run.target, "capture", capture)
    run.step = run.config.steps
    run.measure()
    assert capture.call_count == 0


def poison(run: Trainer) -> None:
    with torch.no_grad():
        module(run).encoder.projection.bias[0] = math.nan


def test_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    run = trainer(tmp_path, steps=20)
    for _ in range(2):
        run.train_step()
    run.save()
    poison(run)
    with pytest.raises(TrainingError, match=r"step 3 .*step-2 .* is intact"):
        run.run()
    again = trainer(tmp_path, steps=20)
    assert again.step == 2
    assert math.isfinite(again.train_step().total)


def test_gradients_that_are_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(tmp_path)
    before = {name: value.clone() for name, value in run.strategy.state().items()}
    real = run.strategy.backward

    def broken(loss: Tensor) -> None:
        real(loss)
        gradient = module(run).encoder.projection.weight.grad
        assert gradient is not None
        gradient.fill_(math.inf)

    monkeypatch.setattr(run.strategy, "backward", broken)
    with pytest.raises(TrainingError, match="gradients are not finite at step 1"):
        run.run()
    after = run.strategy.state()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_weights_that_are_not_finite_are_not_kept(tmp_path: Path) -> None:
    trainer(tmp_path, steps=2).run()
    run = trainer(tmp_path, steps=4)
    with torch.no_grad():
        module(run).encoder.projection.weight[0, 0] = math.nan
    for keep in (run.save, run.export):
        with pytest.raises(TrainingError, match=r"not finite, so .* step-2 in .* is intact"):
            keep()
    assert trainer(tmp_path, steps=4).step == 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_targets_of_other_dtypes(dtype: Any, precision: Any, tmp_path: Path) -> None:
    """As GPUs have them; with an informed start, and a reused layer."""
    target = Target(copy.deepcopy(tiny.model()).to(getattr(torch, dtype)), None, name=dtype)
    for layers in (0, 1):
        config = settings(
            tmp_path / str(layers), mixed_precision=precision, num_target_layers=(layers,)
        )
        run = Trainer(target, EXAMPLES, config)
        run.run()
        assert all(math.isfinite(row["loss"]) for row in run.log.rows())


@pytest.mark.parametrize("trimmed", [False, True])
def test_heads_are_in_a_dtype_that_the_cpu_multiplies(
    trimmed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny.fresh_target()
    target.model.to(torch.bfloat16)
    ids = torch.arange(0, target.vocab_size, 3) if trimmed else None
    states_ME = torch.randn(5, target.identity.hidden_size)
    expected = target.head(states_ME.bfloat16(), ids)
    for native in (False, True):
        monkeypatch.setattr(linear_backends, "_bf16_instructions", lambda native=native: native)
        head = DraftVocabularyHead(target, ids)
        if not native:
            assert head(states_ME).ne(head(states_ME.bfloat16())).any()  # nothing is rounded
        assert_close(head(states_ME).float(), expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"held_out": 2}, "held_out"),
        ({"seed": 5}, "seed"),
        ({"num_target_layers": (1,)}, "num_target_layers"),
        ({"sizes": DrafterSizes(draft_vocab=9)}, "sizes"),
    ],
)
def test_a_resumed_run_holds_the_same_out(
    changes: dict[str, Any], name: str, tmp_path: Path
) -> None:
    trainer(tmp_path, steps=2).run()
    with pytest.raises(InputError, match=f"other .*{name}"):
        trainer(tmp_path, **changes)
    with pytest.raises(InputError, match="other examples"):
        Trainer(tiny.target(), EXAMPLES[:-1], settings(tmp_path))
    assert trainer(tmp_path, learning_rate=1e-4, save_every=1).step == 2


def test_two_runs_in_one_directory(tmp_path: Path) -> None:
    first, second = trainer(tmp_path), trainer(tmp_path)

    def meanwhile(_: StepMetrics) -> None:
        with pytest.raises(InputError, match="Another run trains"):
            second.run()

    first.run(meanwhile)
    assert [row["step"] for row in first.log.rows()] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "damage", [{"order": {}}, {"order": {"generator": [], "queue": [[99]]}}, {"step": "x"}]
)
def test_a_state_that_makes_no_sense(damage: dict[str, Any], tmp_path: Path) -> None:
    trainer(tmp_path, steps=2).run()
    (path,) = (tmp_path / "state").glob("step-*/state.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
    with pytest.raises(TrainingError, match="damaged"):
        trainer(tmp_path)


def test_lines_of_the_log_that_are_no_rows_are_left_out(tmp_path: Path) -> None:
    trainer(tmp_path, steps=2).run()
    log = tmp_path / "log.jsonl"
    log.write_bytes(b"5\n{}\n\xff\n" + log.read_bytes() + b'{"step": 3')
    trainer(tmp_path).run()
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 2, 3, 4]


def test_warm_start_copies_the_first_layer(tmp_path: Path) -> None:
    drafter = module(trainer(tmp_path))
    source = tiny.target().layer_state(0)
    sa = drafter.decoder.self_attention
    assert_close(sa.self_attn.q_proj.weight, source["self_attn.q_proj.weight"], rtol=0, atol=0)
    assert_close(sa.key_value.k_proj.weight, source["self_attn.k_proj.weight"], rtol=0, atol=0)
    assert_close(sa.mlp.down_proj.weight, source["mlp.down_proj.weight"], rtol=0, atol=0)
    assert_close(sa.input_layernorm.weight, source["input_layernorm.weight"], rtol=0, atol=0)


def test_warm_start_of_a_qwen2_target(tmp_path: Path) -> None:
    """Its first layer has query, key and value biases, and so must SA."""
    target = tiny.target("qwen2")
    drafter = module(Trainer(target, EXAMPLES, settings(tmp_path)))
    source = target.layer_state(0)
    bias = drafter.decoder.self_attention.self_attn.q_proj.bias
    assert bias is not None
    assert_close(bias, source["self_attn.q_proj.bias"], rtol=0, atol=0)


def test_warm_start_needs_fitting_shapes(tmp_path: Path) -> None:
    sizes = DrafterSizes(sa_intermediate=57)
    with pytest.raises(InputError, match=r"warm_start .* at most its width \(56\)"):
        trainer(tmp_path, sizes=sizes)
    trainer(tmp_path, sizes=sizes, warm_start=False)


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    target = tiny.target()

    def weights(seed: int) -> torch.Tensor:
        drafter = new_drafter(target, settings(tmp_path, seed=seed), EXAMPLES)
        return drafter.encoder.projection.weight

    assert_close(weights(1), weights(1), rtol=0, atol=0)
    assert not torch.equal(weights(1), weights(2))


def test_trimmed_vocabulary(tmp_path: Path) -> None:
    target = tiny.fresh_target(eos_token_id=2)
    run = Trainer(target, EXAMPLES, settings(tmp_path, sizes=DrafterSizes(draft_vocab=20)))
    run.run()
    loaded = moaspec.load_drafter(tmp_path / "drafter", target=target)
    assert loaded.draft_token_ids is not None
    assert len(loaded.draft_token_ids) == 20
    assert 2 in loaded.draft_token_ids.tolist()


def test_the_vocabulary_is_counted_on_training_examples(tmp_path: Path) -> None:
    run = trainer(tmp_path, held_out=2, sizes=DrafterSizes(draft_vocab=64))
    trained = response_counts(run.data.examples[i] for i in run.data.train_ids)
    assert vocabulary(run) == sorted(trained)
    held_out = response_counts(run.data.examples[i] for i in run.data.held_out_ids)
    assert held_out.keys() - trained.keys()
    share = sum(n for token, n in held_out.items() if token in trained) / held_out.total()
    note = run.notes()[0]
    assert f"{len(trained)} tokens, fewer than sizes.draft_vocab=64" in note
    assert f"{share:.2%} of the held-out response tokens" in note


@pytest.mark.parametrize("instructions", [False, True])
def test_emulated_bf16_is_told(
    instructions: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_backends, "_bf16_instructions", lambda: instructions)
    assert emulation(settings(tmp_path)) is None
    slow = settings(tmp_path, mixed_precision="bf16", target_dtype="bfloat16")
    note = emulation(slow)
    assert (note is None) == instructions
    assert note is None or note.endswith("mixed_precision=no target_dtype=float32.")
    assert emulation(dataclasses.replace(slow, device="cuda")) is None


def test_notes_tell_where_the_drafter_can_be_used(tmp_path: Path) -> None:
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4}
    target = tiny.fresh_target(hidden_size=64, tokenizer=tiny.tokenizer(), **heads)
    run = Trainer(target, EXAMPLES, settings(tmp_path / "a", num_target_layers=(1,)))
    works, *others = run.notes()
    assert works.endswith("work with: moaspec checkpoint export-device.")
    assert "not work with moaspec checkpoint convert: The raw form cannot describe" in others[0]
    assert "not work with vLLM: This drafter reuses" in others[1]
    sizes = DrafterSizes(publishable=True)
    run = Trainer(target, EXAMPLES, settings(tmp_path / "b", sizes=sizes))
    assert run.notes() == [
        "The drafter will work with: moaspec checkpoint convert, vLLM, moaspec checkpoint "
        "export-device."
    ]
    run.run()
    drafter = moaspec.load_drafter(tmp_path / "b" / "drafter", target=target)
    save_published(drafter, tmp_path / "raw", "raw", target=target.identity, context=target.config)


def test_a_warm_up_longer_than_the_run_is_told(tmp_path: Path) -> None:
    (note,) = setting_notes(settings(tmp_path, steps=2, warmup_steps=8))
    assert "reaches 25% of" in note
    assert not setting_notes(settings(tmp_path, steps=8, warmup_steps=8))


def test_the_best_weights_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By held-out tau; a resumed run remembers them."""
    taus = {2: 1.5, 4: 1.9, 6: 1.7, 8: 1.8}

    def measured(run: Trainer) -> dict[int, HeldOutMetrics]:
        rates = (0.5, *[0.0] * (NUM_RANKS - 1))
        return {0: HeldOutMetrics([0.5] * BLOCK_LENGTH, taus[run.step], rates, None)}

    monkeypatch.setattr(Trainer, "measure", measured)

    def steps(name: str) -> int:
        config = json.loads((tmp_path / name / "config.json").read_text())
        return int(config["training"]["steps"])

    trainer(tmp_path, steps=6).run()
    assert (steps("best"), steps("drafter")) == (4, 6)
    assert "| 4 of 6 |" in (tmp_path / "best" / "README.md").read_text()
    again = trainer(tmp_path, steps=8)
    assert again.best == BestStep(step=4, score=1.9)
    again.run()
    assert (steps("best"), steps("drafter")) == (4, 8)
    assert moaspec.load_drafter(tmp_path / "best", target=tiny.target()).config


def test_measured_accuracy_of_a_perfect_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(tmp_path, held_out=2)
    real = run.student.run

    def perfect(*arguments: Any) -> StudentOutput:
        (states,) = real(*arguments).exits
        return StudentOutput([dataclasses.replace(states, drafted_ME=states.target_ME)])

    monkeypatch.setattr(run.student, "run", perfect)
    # The examples are the target's own greedy text, so its first choices are what follows.
    first_always = (1.0, *[0.0] * (NUM_RANKS - 1))
    found = run.measure()[0]
    expected = HeldOutMetrics(
        [1.0] * BLOCK_LENGTH, BLOCK_LENGTH + 1.0, first_always, found.moment_EE
    )
    assert found == expected


def test_staircase_fades_out_over_half_of_training(tmp_path: Path) -> None:
    config = settings(tmp_path, staircase=True, steps=10)
    assert [staircase_probability(config, step) for step in (0, 2, 5, 9)] == [1.0, 0.6, 0.0, 0.0]
    assert staircase_probability(settings(tmp_path), 0) == 0.0
    first = trainer(tmp_path, staircase=True, steps=10).data.next_batch(0).staircase_B
    assert first is not None
    assert bool(first.all())


def test_learning_rate(tmp_path: Path) -> None:
    config = settings(tmp_path, steps=12, warmup_steps=2, learning_rate=1.0, final_lr=0.1)
    rates = [learning_rate(config, step) for step in range(13)]
    assert rates[0] == pytest.approx(0.5)
    assert rates[1] == rates[2] == pytest.approx(1.0)
    assert rates[7] == pytest.approx(0.55)
    assert rates[12] == pytest.approx(0.1)
    assert rates[2:] == sorted(rates[2:], reverse=True)


def test_learning_rate_of_the_paper(tmp_path: Path) -> None:
    """A peak of twenty times the rate that most of training has."""
    config = settings(
        tmp_path, steps=1000, warmup_steps=10, learning_rate=6e-4, final_lr=0.05, decay_steps=20
    )
    assert max(learning_rate(config, step) for step in range(1000)) == pytest.approx(6e-4)
    assert {round(learning_rate(config, step), 9) for step in range(30, 1000)} == {3e-5}


def test_too_few_examples(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="held_out=4"):
        trainer(tmp_path, held_out=4)


def test_held_out_examples_are_not_trained_on(tmp_path: Path) -> None:
    run = trainer(tmp_path, held_out=2, batch_size=1)
    seen = {run.data.next_batch(0).batch.example_ids[0] for _ in range(6)}
    assert seen == {2, 3}


def test_a_resumed_run_must_be_the_same_drafter(tmp_path: Path) -> None:
    """Another config in the same directory is refused with a message, not a traceback."""
    trainer(tmp_path).run()
    changed = dataclasses.replace(
        settings(tmp_path), sizes=DrafterSizes(sa_intermediate=20), warm_start=False
    )
    with pytest.raises((InputError, TrainingError)):
        Trainer(tiny.target(), EXAMPLES, changed)


@pytest.mark.parametrize("content", [b"", b"garbage"])
def test_a_damaged_state_is_reported(content: bytes, tmp_path: Path) -> None:
    trainer(tmp_path).run()
    (state,) = (tmp_path / "state").glob("step-*")
    next(state.glob("*.safetensors")).write_bytes(content)
    with pytest.raises(TrainingError, match="damaged"):
        trainer(tmp_path)


def test_the_number_of_passes_changes_nothing(tmp_path: Path) -> None:
    """Losses are normalised by the tokens of the whole step, however many passes it takes."""
    found = []
    for tokens in (1000, 20, 1):  # of a pass: one pass, and a pass for each row
        run = trainer(
            tmp_path / str(tokens),
            batch_size=3,
            pass_tokens=tokens,
            loss=LossWeights(summary=0.5),
        )
        parts = run.train_step()
        gradients = {name: p.grad for name, p in module(run).named_parameters()}
        found.append((parts, gradients))
    (first, expected), *others = found
    for parts, gradients in others:
        # float32 sums in another order, and rows in batches of another length.
        assert parts.total == pytest.approx(first.total, rel=1e-5)
        assert parts.count == first.count
        for name, gradient in gradients.items():
            assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [(2,), (0, 1), (1, 0, 3)], ids=str)
def test_exits_learn_and_the_export_drafts_with_each(
    layers: tuple[int, ...], tmp_path: Path
) -> None:
    """On-policy training in one pass gives drafts that the engine's cached passes get accepted."""
    run = trainer(
        tmp_path,
        held_out=0,
        batch_size=4,
        steps=60,
        save_every=60,
        num_target_layers=layers,
        loss=LossWeights(feature=0.1, kl=1.0),
    )
    seen: list[StepMetrics] = []
    run.run(seen.append)
    # Two random layers at the end of a tiny target decide nearly all by themselves.
    assert seen[-1].kl < max(seen[0].kl / 2, 0.01)
    drafter = moaspec.load_drafter(tmp_path / "drafter", target=tiny.target())
    assert drafter.config.num_target_layers == layers
    for n in (None, *layers):
        results = moaspec.generate(
            tiny.target(),
            tiny.PROMPTS,
            drafter=drafter,
            max_new_tokens=tiny.NEW_TOKENS,
            tree=moaspec.Chain(3),
            num_target_layers=n,
        )
        assert [tuple(result.token_ids) for result in results] == list(tiny.own_texts("llama"))
        rounds = sum(result.num_rounds for result in results)
        assert sum(sum(result.accept_lengths) for result in results) / rounds > 1.2


def test_acceptance_of_each_exit_is_recorded(tmp_path: Path) -> None:
    layers = (0, 2)
    run = trainer(tmp_path, num_target_layers=layers, steps=2, activation_cache=False)
    run.run()
    config = moaspec.load_drafter(tmp_path / "drafter", target=tiny.target()).config
    measured = run.measure()
    # The measurement of the last step, whose weights the drafter has.
    assert [config.acceptance_of(n) for n in layers] == [(measured[n].acceptance,) for n in layers]
    assert config.acceptance_of(0) != config.acceptance_of(2)
    again = trainer(tmp_path, num_target_layers=layers, steps=2, activation_cache=False)
    again.run()  # finished: it measures nothing and writes the drafter again
    assert moaspec.load_drafter(tmp_path / "drafter", target=tiny.target()).config == config


def test_an_exit_that_was_not_trained_is_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path, num_target_layers=(0, 1), steps=1)
    run.run()
    drafter = moaspec.load_drafter(tmp_path / "drafter", target=tiny.target())
    with pytest.raises(InputError, match="trained for N = 0, 1"):
        moaspec.generate(tiny.target(), [1, 2], drafter=drafter, num_target_layers=2)


@pytest.mark.parametrize("kind", get_args(Divergence))
def test_every_divergence_falls(kind: Divergence, tmp_path: Path) -> None:
    weights = LossWeights(feature=0.0, kl=1.0, divergence=kind)
    run = trainer(tmp_path, held_out=0, batch_size=4, steps=30, save_every=30, loss=weights)
    seen: list[StepMetrics] = []
    run.run(seen.append)
    assert seen[-1].kl < 0.95 * seen[0].kl


@pytest.mark.slow
def test_simulated_tau_is_that_of_real_chains(tmp_path: Path) -> None:
    """The engine's own drafter, started at every whole block of the held-out responses."""
    run = trainer(
        tmp_path, held_out=3, batch_size=2, steps=40, learning_rate=1e-2, activation_cache=False
    )
    for _ in range(40):
        run.train_step()
    run.data.held_out_ids = list(range(4))
    target, drafter = tiny.target(), module(run).eval()
    lengths = []
    for example in run.data.examples:
        text, start = example.token_ids, len(example.prompt_ids)
        for root in range(start, len(text) - BLOCK_LENGTH, BLOCK_LENGTH):
            drafting = FastMoAProposer(drafter, target)
            verifier = LocalVerifier(target, drafting)
            run_now(verifier.verify([VerifyRequest(0, 0, tuple(text[:root]))]))
            (tree,) = drafting.propose(
                [RequestText(0, text[: root + 1])], moaspec.Chain(BLOCK_LENGTH)
            )
            wanted = text[root + 1 : root + 1 + BLOCK_LENGTH]
            agreed = [a == b for a, b in zip(tree.tokens, wanted, strict=True)]
            lengths.append([*agreed, False].index(False))
    assert sum(lengths) > 0
    assert run.measure()[0].tau == pytest.approx(sum(lengths) / len(lengths) + 1, abs=1e-3)


def test_mixed_precision_changes_little(tmp_path: Path) -> None:
    """bf16 has 8 bits, so losses agree to a percent or so."""
    exact = trainer(tmp_path / "a").train_step()
    mixed = trainer(tmp_path / "b", mixed_precision="bf16").train_step()
    assert mixed.total == pytest.approx(exact.total, rel=0.03)
    assert mixed.total != exact.total


def test_it_leaves_in_time_and_goes_on_exactly(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", steps=5)
    assert whole.run() is StopCause.FINISHED
    for step in range(1, 5):
        cut = trainer(tmp_path / "cut", steps=5, save_every=100)
        assert cut.run(seconds=1e-9) is StopCause.TIME
        assert cut.step == step
    last = trainer(tmp_path / "cut", steps=5)
    assert last.run(seconds=1000) is StopCause.FINISHED
    for name, value in module(last).state_dict().items():
        assert_close(value, module(whole).state_dict()[name], rtol=0, atol=0)
    rows = (tmp_path / "cut" / "log.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("number", "cause"),
    [(signal.SIGINT, StopCause.INTERRUPTED), (signal.SIGTERM, StopCause.TERMINATED)],
)
def test_a_signal_saves_the_very_last_step(
    number: signal.Signals, cause: StopCause, tmp_path: Path
) -> None:
    run = trainer(tmp_path, steps=100, save_every=100)

    def report(progress: StepMetrics) -> None:
        if progress.step == 3:
            signal.raise_signal(number)

    assert run.run(report) is cause
    again = trainer(tmp_path, steps=100)
    assert again.step == run.step == 4
    for name, value in module(again).state_dict().items():
        assert_close(value, module(run).state_dict()[name], rtol=0, atol=0)


def test_the_card_names_the_adapter(tmp_path: Path) -> None:
    trainer(tmp_path, steps=1, adapter="my-lora").run()
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert ', adapter="my-lora")\n' in card
    assert "| adapter merged into the target | `my-lora`, SHA-256 " in card


def test_the_card_tells_what_was_done(tmp_path: Path) -> None:
    run = trainer(tmp_path, num_target_layers=(0, 1), steps=3)
    run.run()
    card = (tmp_path / "drafter" / "README.md").read_text()
    for words in (
        "tiny-llama",
        "simulated tau",
        "`unused`",
        "| 3 of 3 |",
        '"save_every": 2',
        "0, 1",
        "| draft vocabulary | 64 of 64 tokens |",
        f"| parameters | {sum(p.numel() for p in module(run).parameters()) / 1e6:.1f}M |",
        "| licence | not stated",
    ):
        assert words in card
    assert "base_model" not in card  # "tiny" is no model of the hub
    assert "Curve" in card
    assert card.count("\n| 3 |") == 1


def test_the_head_of_the_card(tmp_path: Path) -> None:
    for target, base in (
        ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("me/it", "me/it"),
    ):
        run = trainer(tmp_path / target, target=target, license="apache-2.0", steps=1)
        run.run()
        card = (tmp_path / target / "drafter" / "README.md").read_text()
        _, head, _ = card.split("---\n", 2)
        info = yaml.safe_load(head)
        assert (info["base_model"], info["license"]) == (base, "apache-2.0")
        assert info["library_name"] == "moaspec"
        assert info["pipeline_tag"] == "text-generation"


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["generate", "serve", "vllm-config"]),
        ({"num_target_layers": (1,)}, ["generate", "serve"]),  # vLLM drafts with N = 0 only
        ({"adapter": "my lora"}, ["generate", "serve"]),
        ({"drafter": "eagle"}, ["generate", "serve"]),
    ],
)
def test_the_commands_of_the_card(
    options: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    """They name the target and can be parsed; those that refuse the drafter are left out."""
    trainer(tmp_path, target="me/it", steps=1, **options).run()
    card = (tmp_path / "drafter" / "README.md").read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```$", card, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    commands = [shlex.split(re.sub(r'^eval "\$\((.*)\)"$', r"\1", line)) for line in lines]
    assert [words[:2] for words in commands] == [["moaspec", name] for name in names]
    for _, name, *arguments in commands:
        group: Any = typer.main.get_command(app)
        command = group.commands[name]
        context = type(typer.Context(command))(command)
        parsed, *_ = command.make_parser(context).parse_args(args=arguments)
        assert (parsed["model"], parsed["drafter"]) == ("me/it", "DIRECTORY")
        assert parsed.get("adapter") == options.get("adapter")
    assert ("moaspec.load_drafter(" in card) == (options.get("drafter") != "eagle")
    config = read_config(tmp_path / "drafter")
    assert config["speculators_config"]["verifier"]["name_or_path"] == "me/it"


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["eagle", "independent"])
def test_baselines_learn_by_the_same_loop(drafter: Any, tmp_path: Path) -> None:
    run = trainer(
        tmp_path,
        held_out=0,
        batch_size=4,
        steps=120,
        save_every=120,
        drafter=drafter,
        loss=LossWeights(feature=0.1, kl=1.0),
    )
    seen: list[StepMetrics] = []
    run.run(seen.append)
    assert seen[-1].kl < seen[0].kl / 2
    results = moaspec.generate(
        tiny.target(),
        tiny.PROMPTS,
        drafter=load_any_drafter(tmp_path / "drafter", target=tiny.target()),
        max_new_tokens=tiny.NEW_TOKENS,
        tree=moaspec.Chain(2),
    )
    assert [tuple(result.token_ids) for result in results] == list(tiny.own_texts("llama"))
    rounds = sum(result.num_rounds for result in results)
    assert sum(sum(result.accept_lengths) for result in results) / rounds > 1.2
    assert trainer(tmp_path, held_out=0, batch_size=4, steps=120, drafter=drafter).step == 120
    # Nothing but final states was kept.
    (kept,) = (tmp_path / "activations").rglob("*.data")
    tokens = sum(map(len, EXAMPLES))
    assert kept.stat().st_size == 2 * tokens * tiny.target().identity.hidden_size


@pytest.mark.parametrize("without", [("lsa",), ("sa",), ("lsa", "sa"), ("ca",)], ids=str)
def test_parts_left_out(without: tuple[Any, ...], tmp_path: Path) -> None:
    run = trainer(tmp_path, steps=3, sizes=DrafterSizes(without=without))
    run.run()
    drafter = moaspec.load_drafter(tmp_path / "drafter", target=tiny.target())
    assert drafter.config.without == without
    ids = torch.tensor([list(tiny.PROMPTS[2])])
    ones = torch.ones_like(ids)
    start = torch.zeros_like(ids)
    before = block_logits(drafter, tiny.target(), ids, ones, start)[0, -1]
    changed = ids.clone()
    changed[0, 5] = 9
    after = block_logits(drafter, tiny.target(), changed, ones, start)[0, -1]
    # Only SA tells the last query of a token that CA may not read.
    assert torch.equal(before, after) == ("sa" in without)
    kv = torch.randn(1, 2, 3, drafter.config.kv_size)
    earlier = torch.cat((torch.randn(1, 2, 2, drafter.config.kv_size), kv[:, :, 2:]), dim=2)
    same = torch.equal(drafter.aggregate(kv), drafter.aggregate(earlier))
    assert same == ("lsa" in without)
    (result,) = moaspec.generate(
        tiny.target(), tiny.PROMPTS[:1], drafter=drafter, max_new_tokens=tiny.NEW_TOKENS
    )
    assert tuple(result.token_ids) == tiny.own_texts("llama")[0]


@pytest.mark.slow
def test_tau_rises_on_a_qwen3_never_seen_before(tmp_path: Path) -> None:
    """Three layers, random weights, a drafter without warm start, and nothing but its own text."""
    target = tiny.fresh_target("qwen3", seed=77, initializer_range=0.1)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(tiny.VOCAB, (64, 4), generator=generator).tolist()
    texts = [result.token_ids for result in moaspec.generate(target, prompts, max_new_tokens=26)]
    examples = [Example(p, t) for p, t in zip(prompts, texts, strict=True)]
    run = Trainer(
        target,
        examples,
        settings(
            tmp_path,
            held_out=40,
            batch_size=8,
            steps=150,
            warm_start=False,
            save_every=75,
            shortest_block=5,
            longest_block=12,
            loss=LossWeights(feature=0.1, kl=1.0),
        ),
    )
    before = run.measure()[0].tau
    run.run()
    after = run.measure()[0].tau
    assert before is not None
    assert after is not None
    assert after > before + 0.5


def test_it_goes_on_from_an_earlier_drafter(tmp_path: Path) -> None:
    first = trainer(tmp_path / "first", steps=3)
    first.run()
    earlier = str(tmp_path / "first" / "drafter")
    second = trainer(tmp_path / "second", initial=earlier, seed=9)
    for name, weight in module(first).state_dict().items():
        # The checkpoint is bf16.
        assert torch.equal(module(second).state_dict()[name], weight.bfloat16().float()), name
    before = module(second).encoder.projection.weight.clone()
    second.run()
    assert not torch.equal(module(second).encoder.projection.weight, before)


def test_an_earlier_drafters_vocabulary_grows_by_frequent_tokens(tmp_path: Path) -> None:
    first = trainer(tmp_path / "first", steps=1, sizes=DrafterSizes(draft_vocab=8))
    first.run()
    earlier = str(tmp_path / "first" / "drafter")
    second = trainer(tmp_path / "second", initial=earlier, sizes=DrafterSizes(draft_vocab=12))
    had, has = vocabulary(first), vocabulary(second)
    assert (len(had), len(has)) == (8, 12)
    assert set(had) < set(has)
    counts = response_counts(second.data.examples[i] for i in second.data.train_ids)
    left_out = max(n for token, n in counts.items() if token not in has)
    assert min(counts[token] for token in set(has) - set(had)) >= left_out
    second.run()
    again = trainer(tmp_path / "third", initial=str(tmp_path / "second" / "drafter"))
    assert vocabulary(again) == has
    with pytest.raises(InputError, match=r"drafts with 12 tokens.*can only grow"):
        trainer(
            tmp_path / "fourth",
            initial=str(tmp_path / "second" / "drafter"),
            sizes=DrafterSizes(draft_vocab=8),
        )


def test_an_earlier_drafter_gets_further_layers_that_change_nothing_at_first(
    tmp_path: Path,
) -> None:
    first = trainer(tmp_path / "first", steps=3)
    first.run()
    earlier = str(tmp_path / "first" / "drafter")
    same = trainer(tmp_path / "same", initial=earlier)
    second = trainer(tmp_path / "second", initial=earlier, sizes=DrafterSizes(sa_layers=3))
    part = first.data.next_batch(0)
    with torch.no_grad():
        (expected,), (found,) = (
            one.student.run(module(one), part, 0).exits for one in (same, second)
        )
    # Threads share sums out by the sizes of tensors: 1.2e-5 was seen with two.
    assert_close(found.drafted_ME, expected.drafted_ME, atol=1e-4, rtol=0)
    second.run()
    directory = str(tmp_path / "second" / "drafter")
    drafter = moaspec.load_drafter(directory, target=second.target)
    assert drafter.config.self_attention_layers == 3
    for layer in drafter.decoder.text_layers[1:]:
        assert layer.self_attn.o_proj.weight.abs().max() > 0
        assert layer.mlp.down_proj.weight.abs().max() > 0
    kept = trainer(tmp_path / "third", initial=directory)
    assert module(kept).config.self_attention_layers == 3
    with pytest.raises(InputError, match=r"sa_layers=2.*has 3, and a run can only add layers"):
        trainer(tmp_path / "fourth", initial=directory, sizes=DrafterSizes(sa_layers=2))


def test_a_new_drafter_with_several_layers_of_sa_trains(tmp_path: Path) -> None:
    run = trainer(tmp_path, steps=3, sizes=DrafterSizes(sa_layers=2))
    before = run.measure()
    run.run()
    assert len(module(run).decoder.text_layers) == 2
    assert run.measure() != before


def test_an_earlier_drafter_keeps_its_n(tmp_path: Path) -> None:
    trainer(tmp_path / "first", steps=1).run()
    with pytest.raises(InputError, match=r"drafts with N = \(0,\).*asks for \(0, 1\)"):
        trainer(
            tmp_path / "second",
            initial=str(tmp_path / "first" / "drafter"),
            num_target_layers=(0, 1),
        )
