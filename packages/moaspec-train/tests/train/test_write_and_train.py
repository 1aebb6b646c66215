"""Writing and training by turns loses nothing at a kill, and keeps the best drafter."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import chat_tokenizers
import moaspec
from moaspec.backends.fast_target import accelerate
from moaspec.target.target import Target
from moaspec_core.chat.chat_template import ChatTemplate
from moaspec_core.errors import InputError
from moaspec_train import write_and_train
from moaspec_train.cli.continuous import line, parse_size
from moaspec_train.dataset.journal import Journal
from moaspec_train.dataset.regenerate import fingerprint, first_prompt, regenerate
from moaspec_train.dataset.response_writer import ResponseWriter, WriterOptions
from moaspec_train.run_config import TrainConfig
from moaspec_train.stopping import StopCause
from moaspec_train.students.target_activations import target_fingerprint
from moaspec_train.trainer import Trainer
from moaspec_train.write_and_train import (
    Progress,
    WriteAndTrain,
    passes_that_pay,
    tau_per_doubling,
)

pytestmark = pytest.mark.essential

PROMPTS = [
    chat_tokenizers.talk(f"w{20 + i} w{30 + i}", *more)
    for i in range(13)
    for more in ([], [f"w{40 + i}", f"w{20 + i}"])[: 1 + i % 2]
]
HELD_OUT = 2


@pytest.fixture(scope="module")
def target() -> Target:
    return chat_tokenizers.target(seed=7)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of four answers, new ones after one pass over the others, everything saved at once."""
    monkeypatch.setattr(write_and_train, "GROUP_SIZE", 4)
    monkeypatch.setattr(write_and_train, "FIRST_TOGETHER", 2)
    monkeypatch.setattr(write_and_train, "MOST_TOGETHER", 2)
    monkeypatch.setattr(write_and_train, "SAVE_EVERY_S", 0.0)
    monkeypatch.setattr(write_and_train, "TELL_EVERY_S", 0.0)
    monkeypatch.setattr(write_and_train, "passes_that_pay", lambda *_: 1)


def settings(output: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "target": "tiny",
        "prompts": ("unused",),
        "output": str(output),
        "held_out": HELD_OUT,
        "batch_size": 2,
        "learning_rate": 4e-3,
        "warmup_steps": 2,
        "max_new_tokens": 12,
        "frozen_lsa": 1.0,
        "shortest_block": 3,
        "longest_block": 7,
    }
    return TrainConfig(**values | changes)


def run(
    target: Target, output: Path, at_step: Callable[[Trainer], object], **changes: Any
) -> tuple[StopCause, list[Progress]]:
    """A run that calls `at_step` after each step of training."""
    told: list[Progress] = []
    with pytest.MonkeyPatch.context() as patch:
        step = Trainer.train_step

        def train_step(trainer: Trainer) -> Any:
            sums = step(trainer)
            at_step(trainer)
            return sums

        patch.setattr(Trainer, "train_step", train_step)
        whole = WriteAndTrain(target, settings(output, **changes), PROMPTS, report=told.append)
        return whole.run(), told


def until(last: int) -> Callable[[Trainer], object]:
    """Stops a run after a step, as Ctrl-C does."""

    def at_step(trainer: Trainer) -> None:
        if trainer.step == last:
            signal.raise_signal(signal.SIGINT)

    return at_step


def rows(output: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (output / "answers.jsonl").read_text().splitlines()]


def all_rows(target: Target, path: Path) -> list[dict[str, Any]]:
    """What the target answers, written at once."""
    options = WriterOptions(max_new_tokens=12, batch_size=2, group_size=4)
    writer = ResponseWriter(target, None, options)
    with Journal(path, writer.settings(prompts=fingerprint(PROMPTS))) as journal:
        regenerate(writer, PROMPTS, journal)
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_it_answers_every_prompt_and_trains_on_what_it_keeps(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    capture = Target.capture

    def count(whole: Target, input_ids_BT: Tensor, *rest: Any, **named: Any) -> Any:
        asked.append(len(input_ids_BT))
        return capture(whole, input_ids_BT, *rest, **named)

    monkeypatch.setattr(Target, "capture", count)
    cause, told = run(target, tmp_path / "run", until(60))
    assert cause is StopCause.INTERRUPTED
    assert rows(tmp_path / "run") == all_rows(target, tmp_path / "at-once.jsonl")
    assert told[-1].written == sum(len(row["response_ids"]) for row in rows(tmp_path / "run"))
    assert told[-1].tau is not None
    log = [json.loads(text) for text in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < log[1]["loss"]
    # Of the first group, which no drafter was there to keep for, and of the probe.
    assert sum(asked) < 4 * len(PROMPTS)
    moaspec.load_drafter(tmp_path / "run/best", target=target)


class KillError(BaseException):
    """Ends a run as a kill does: nothing is saved after it."""


def killed_while_training(step: int) -> Callable[[pytest.MonkeyPatch], None]:
    def arrange(patch: pytest.MonkeyPatch) -> None:
        train = Trainer.timed_step

        def timed_step(trainer: Trainer) -> Any:
            if trainer.step == step:
                raise KillError
            return train(trainer)

        patch.setattr(Trainer, "timed_step", timed_step)

    return arrange


def killed_while_writing(number: int) -> Callable[[pytest.MonkeyPatch], None]:
    """After so many tokens of a run's answers."""

    def arrange(patch: pytest.MonkeyPatch) -> None:
        wrote, written = WriteAndTrain._wrote, 0

        def count(whole: WriteAndTrain, tokens: int) -> None:
            nonlocal written
            written += tokens
            if written >= number:
                raise KillError
            wrote(whole, tokens)

        patch.setattr(WriteAndTrain, "_wrote", count)
        patch.setattr(Journal, "keep", lambda *_: None)  # as a kill leaves no time for it

    return arrange


def killed_while_measuring(patch: pytest.MonkeyPatch) -> None:
    def measure(_: Trainer) -> Any:
        raise KillError

    patch.setattr(Trainer, "measure", measure)


def killed_while_saving(patch: pytest.MonkeyPatch) -> None:
    def rename(*_: object) -> None:
        raise KillError

    patch.setattr("pathlib.Path.rename", rename)


@pytest.mark.parametrize(
    "arrange",
    [
        pytest.param(killed_while_writing(10), id="first answers"),
        pytest.param(killed_while_measuring, id="measuring"),
        pytest.param(killed_while_saving, id="saving"),
        pytest.param(killed_while_training(7), id="training"),
        pytest.param(killed_while_writing(110), id="later answers"),
    ],
)
def test_a_killed_run_goes_on_in_another_directory(
    arrange: Callable[[pytest.MonkeyPatch], None], target: Target, tmp_path: Path
) -> None:
    """Answers that were saved are not written again, and no step that was saved is lost."""
    here, there = tmp_path / "here", tmp_path / "there"
    with pytest.MonkeyPatch.context() as patch:
        arrange(patch)
        with pytest.raises(KillError):
            run(target, here, lambda _: None)
    saved = rows(here)
    steps = [int(path.name.removeprefix("step-")) for path in here.glob("state/step-*")]
    shutil.move(here, there)
    first: list[int] = []

    def at_step(trainer: Trainer) -> None:
        first.append(trainer.step)
        until(40)(trainer)

    run(target, there, at_step)
    assert rows(there)[: len(saved)] == saved
    assert rows(there) == all_rows(target, tmp_path / "at-once.jsonl")
    assert first[0] == max(steps, default=0) + 1
    log = [json.loads(text) for text in (there / "log.jsonl").read_text().splitlines()]
    trained = [row["step"] for row in log if row["loss"]]
    assert trained == list(range(1, 41))
    assert all(math.isfinite(row["loss"]) for row in log)


@pytest.mark.parametrize("name", ["drafter", "best"])
def test_with_the_drafter_alone_the_next_prompts_are_answered(
    name: str, target: Target, tmp_path: Path
) -> None:
    """And trained on as soon as they are there, however much it was trained before."""
    run(target, tmp_path / "a", until(6))
    drafter = tmp_path / "a" / name
    about = json.loads((drafter / "config.json").read_text())["training"]
    answered = about["prompts"]["answered"]
    assert 0 < answered < len(PROMPTS)
    _, told = run(target, tmp_path / "b", until(2), initial=str(drafter), kept=str(tmp_path / "k"))
    assert told[0].trained >= about["loss_tokens"] + about["earlier_loss_tokens"]
    template = ChatTemplate(target.tokenizer)
    asked = [first_prompt(template, one) for one in PROMPTS[answered:]]
    new = [row["prompt_ids"] for row in rows(tmp_path / "b") if not row["turn"]]
    assert new == asked[: len(new)]
    assert len(new) <= 8  # two groups


def test_prompts_that_were_all_answered_are_refused(target: Target, tmp_path: Path) -> None:
    run(target, tmp_path / "a", until(60))
    with pytest.raises(InputError, match=f"All {len(PROMPTS)} prompts were answered"):
        run(target, tmp_path / "b", until(1), initial=str(tmp_path / "a/drafter"))


def test_a_group_without_examples_does_not_end_a_run(target: Target, tmp_path: Path) -> None:
    """Answers may all be longer than an example; the next ones may not."""
    long = [chat_tokenizers.talk(" ".join(f"w{i}" for i in range(20, 60)))] * 8
    whole = WriteAndTrain(target, settings(tmp_path, max_length=30), [*long, *PROMPTS])
    with pytest.MonkeyPatch.context() as patch:
        step = Trainer.train_step
        patch.setattr(Trainer, "train_step", lambda trainer: (step(trainer), until(3)(trainer))[0])
        assert whole.run() is StopCause.INTERRUPTED
    assert (tmp_path / "drafter").exists()


def test_a_drafter_that_reuses_layers_learns_too(
    target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(target, tmp_path, until(3), num_target_layers=(1,))
    assert [text for text in caplog.messages if "reads each answer again" in text]
    moaspec.load_drafter(tmp_path / "drafter", target=target)


def test_a_run_goes_on_with_a_target_that_is_laid_out_otherwise(target: Target) -> None:
    """Which matrices are packed depends on the CPU."""
    packed = chat_tokenizers.target(seed=7)
    accelerate(packed)
    assert target_fingerprint(packed, packed=True) == target_fingerprint(target, packed=True)
    other = chat_tokenizers.target(seed=8)
    assert target_fingerprint(other, packed=True) != target_fingerprint(target, packed=True)


def test_a_full_disk_ends_the_writing_only(
    target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(target, tmp_path, until(3))
    used = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    before = len(rows(tmp_path))
    whole = WriteAndTrain(target, settings(tmp_path), PROMPTS, disk_bytes=used)
    with pytest.MonkeyPatch.context() as patch:
        step = Trainer.train_step
        patch.setattr(Trainer, "train_step", lambda trainer: (step(trainer), until(9)(trainer))[0])
        whole.run()
    assert len(rows(tmp_path)) == before
    assert len([text for text in caplog.messages if "disk space" in text]) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompts": (), "data": ("d",)}, "prompts"),
        ({"frozen_lsa": 0.5}, "frozen_lsa=1"),
        ({"staircase": True}, "staircase"),
        ({"held_out": 0}, "held_out"),
        ({"held_out": 40}, "more prompts"),
        ({"batch_size": 40}, "more prompts"),
        ({"max_new_tokens": 1}, "max_new_tokens"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    changes: dict[str, Any], said: str, target: Target, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=said):
        run(target, tmp_path, lambda _: None, **changes)


@pytest.mark.parametrize("speed", [0.1, 1.0, 10.0])
def test_slow_writing_is_used_more_often(speed: float) -> None:
    """The best number of passes is that of a search by time, and grows with the cost of a text."""
    best = [passes_that_pay(400 * speed, 900 * cost * speed) for cost in (0.1, 0.5, 1, 2, 5)]
    assert best == sorted(best)
    assert best[0] < best[-1]
    hour = max(
        range(1, 21),
        key=lambda p: sum(math.exp(-i / 5) for i in range(p)) / (1 / 400 + p / 900),
    )
    assert passes_that_pay(400, 900) == hour


def test_the_gain_of_a_doubling_is_that_of_the_log() -> None:
    rows = [
        {"tokens": tokens, "held_out_tau": {"0": 2 + 0.3 * math.log2(1000 + tokens)}}
        for tokens in (0, 300, 700, 1500, 3000)
    ]
    assert tau_per_doubling(rows, 1000) == pytest.approx(0.3)
    assert tau_per_doubling(rows[:2], 1000) is None
    progress = Progress(3700, 12_345, 400.0, 2_345_678, 900.4, 3.456, (0.3, 2.0))
    assert line(progress) == (
        "1:02, written 12k (400/s), trained 2.35M (900/s), held-out tau 3.46, "
        "next doubling +0.30 in 2.0 h, +0.18 an hour"
    )
    assert progress.pays
    assert not dataclasses.replace(progress, doubling=(0.04, 2.0)).pays


def test_a_size_is_read() -> None:
    assert parse_size("40GB") == 40e9
    assert parse_size("1.5 mb") == 1.5e6
    for wrong in ("40", "GB", "-1GB", "0GB", "40 GiB"):
        with pytest.raises(InputError, match="size"):
            parse_size(wrong)
