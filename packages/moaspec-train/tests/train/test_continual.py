"""A server's drafter learns from texts: versions, roll-back, exact restart, nothing stored."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ruled_target
import tiny
from moaspec.model.checkpoint.moa_checkpoint import fingerprint, load_checkpoint, save_drafter
from moaspec.model.moa import MoADrafter
from moaspec_core.errors import InputError, TrainingError
from moaspec_train.continual import (
    KEPT_VERSIONS,
    ContinualTrainer,
    CycleReport,
    LearnConfig,
    is_held_out,
    newest_version,
    version_directory,
)
from moaspec_train.training_state import STATE_FILE, SUMS_FILE
from ruled_target import Text


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ruled_target.save_initial(tmp_path_factory.mktemp("initial"))


@pytest.fixture(scope="module")
def stream() -> list[Text]:
    return list(ruled_target.stream())


def learner(initial: Path, directory: Path, **changes: Any) -> ContinualTrainer:
    values: dict[str, Any] = {"batch_size": 4, "steps": 3, "held_out": 4, "learning_rate": 3e-3}
    config = LearnConfig(**values | changes)
    return ContinualTrainer(ruled_target.target(), initial, directory, config)


def fed(to: ContinualTrainer, texts: list[Text], *, cycles: int | None = None) -> list[CycleReport]:
    """The reports of all cycles; stops after so many."""
    reports: list[CycleReport] = []
    for prompt, response in texts:
        if cycles is not None and len(reports) == cycles:
            break
        report = to.add(prompt, response)
        if report is not None:
            reports.append(report)
    return reports


def checkpoint(directory: Path) -> MoADrafter:
    target = ruled_target.target()
    return load_checkpoint(directory, target.identity, target.config)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return checkpoint(directory).state_dict()


def test_tau_rises_on_texts_that_were_never_trained_on(
    initial: Path, tmp_path: Path, stream: list[Text]
) -> None:
    reports = fed(learner(initial, tmp_path), stream * 2)
    assert reports[-1].tau_before > reports[0].tau_before + 1
    versions = [report.version for report in reports]
    assert versions == [sum(r.accepted for r in reports[: i + 1]) for i in range(len(reports))]
    newest = newest_version(tmp_path)
    assert newest == version_directory(tmp_path, versions[-1])
    assert fingerprint(checkpoint(newest)) == reports[-1].fingerprint


def test_the_newest_versions_are_kept(
    initial: Path, tmp_path: Path, stream: list[Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, taus = learner(initial, tmp_path, batch_size=1, steps=1), itertools.cycle((2.0, 1.0))
    monkeypatch.setattr(one, "_tau", lambda: next(taus))
    reports = fed(one, stream * 2, cycles=KEPT_VERSIONS + 2)
    assert [report.version for report in reports] == [1, 2, 3, 4, 5]
    assert {path.name for path in tmp_path.glob("version-*")} == {
        *("version-3", "version-4", "version-5"),
    }


def test_the_outcome_of_a_cycle_is_one_sentence() -> None:
    made = CycleReport(
        cycle=2,
        version=1,
        accepted=True,
        tau_before=1.0,
        tau_after=1.25,
        texts=9,
        fingerprint="",
    )
    assert made.sentence() == "Learning cycle 2 made version 1: held-out tau 1.000 -> 1.250."
    rolled_back = dataclasses.replace(made, accepted=False, tau_after=None)
    assert rolled_back.sentence() == (
        "Learning cycle 2 is rolled back to version 1: held-out tau 1.000 -> not finite."
    )


def test_versions_share_their_encoder(initial: Path, tmp_path: Path, stream: list[Text]) -> None:
    """Otherwise what an earlier version made of verified tokens would be of no use to the next."""
    fed(learner(initial, tmp_path), stream, cycles=1)
    before, after = weights(initial), weights(newest_version(tmp_path) or initial)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert not {name for name in changed if name.startswith("encoder.")}


def test_a_falling_tau_rolls_back(initial: Path, tmp_path: Path, stream: list[Text]) -> None:
    """Much too high a learning rate ruins the weights of each cycle, and they are restored."""
    good = learner(initial, tmp_path)
    fed(good, stream, cycles=2)
    version, before = good.version, weights(newest_version(tmp_path) or initial)
    bad = learner(initial, tmp_path, learning_rate=1.0)
    assert bad.version == version > 0
    steps = bad.steps
    state = {name: tensor.clone() for name, tensor in bad._before.items()}
    reports = fed(bad, stream * 2, cycles=2)
    assert [report.accepted for report in reports] == [False] * len(reports) != []
    assert all(report.tau_after < report.tau_before for report in reports if report.tau_after)
    assert (bad.version, bad.steps) == (version, steps)
    assert bad._before.keys() == state.keys()
    assert all(torch.equal(bad._before[name], state[name]) for name in state)
    assert all(torch.equal(bad._state()[name], state[name]) for name in state)
    after = weights(newest_version(tmp_path) or initial)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_gradients_that_are_not_finite_roll_back(
    initial: Path, tmp_path: Path, stream: list[Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = learner(initial, tmp_path)
    monkeypatch.setattr(one._strategy, "update", lambda _: float("nan"))
    reports = fed(one, stream)
    assert reports
    assert {(report.accepted, report.tau_after) for report in reports} == {(False, None)}
    assert newest_version(tmp_path) is None


def test_a_restart_is_exact(initial: Path, tmp_path: Path, stream: list[Text]) -> None:
    """Killed within a cycle, it goes on from its last state to the same bits."""
    texts = stream * 2
    whole = fed(learner(initial, tmp_path / "whole"), texts, cycles=3)
    first = learner(initial, tmp_path / "cut")
    cut = fed(first, texts, cycles=1)
    for prompt, response in texts[first.texts : first.texts + 7]:
        first.add(prompt, response)  # lost with the process
    second = learner(initial, tmp_path / "cut")
    assert second.texts == cut[-1].texts
    cut += fed(second, texts[second.texts :], cycles=2)
    assert cut == whole
    assert (tmp_path / "cut" / "log.jsonl").read_text() == (
        tmp_path / "whole" / "log.jsonl"
    ).read_text()
    states = [
        (directory / "state" / "step-3" / "model.safetensors").read_bytes()
        for directory in (tmp_path / "cut", tmp_path / "whole")
    ]
    assert states[0] == states[1]


def test_no_text_is_written(initial: Path, tmp_path: Path, stream: list[Text]) -> None:
    """Files have weights, moments and numbers of cycles; the lists of texts end with a cycle."""
    one = learner(initial, tmp_path)
    reports = fed(one, stream * 2, cycles=2)
    assert (one._batch, one._held_out) == ([], [])
    row = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    assert row.keys() == vars(reports[-1]).keys() | {"step"}
    data = json.loads((tmp_path / "state" / "step-2" / STATE_FILE).read_text())
    expected = {"texts", "steps", "cycle", "fingerprints", "generator"}
    assert data.keys() == expected
    files = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert files <= {"log.jsonl", STATE_FILE, SUMS_FILE, "config.json", "model.safetensors"}


def test_a_prompt_stays_on_its_side(initial: Path, tmp_path: Path, stream: list[Text]) -> None:
    """Also when it is asked again, so nothing that is measured was trained on."""
    sides = {prompt: is_held_out(prompt) for prompt, _ in stream}
    assert 5 <= sum(sides.values()) <= 25
    one = learner(initial, tmp_path, batch_size=100, held_out=100)
    for prompt, response in stream * 2:
        one.add(prompt, response)
        kept = one._held_out if sides[prompt] else one._batch
        if kept:
            assert kept[-1].prompt_ids == prompt or len(kept) == 100
    assert all(sides[example.prompt_ids] for example in one._held_out)
    assert not any(sides[example.prompt_ids] for example in one._batch)


def test_short_and_long_texts(initial: Path, tmp_path: Path) -> None:
    one = learner(initial, tmp_path, max_length=40)
    one.add((1, 2), (3,) * 15)  # no whole block
    one.add((1,) * 40, (3,) * 40)  # the prompt fills the text
    assert (one._batch, one._held_out, one.texts) == ([], [], 2)
    one.add((1, 2), (3,) * 100)
    (kept,) = [*one._batch, *one._held_out]
    assert len(kept) == 40


def test_a_directory_of_another_drafter_is_refused(
    initial: Path, tmp_path: Path, stream: list[Text]
) -> None:
    fed(learner(initial, tmp_path), stream, cycles=1)
    save_drafter(tiny.random_drafter(ruled_target.target(), seed=5), tmp_path / "other")
    with pytest.raises(InputError, match="versions of another drafter"):
        learner(tmp_path / "other", tmp_path)


@pytest.mark.parametrize("data", ["{}", "[]", "{", '{"fingerprints": 1}'])
def test_a_damaged_state_is_refused(
    data: str, initial: Path, tmp_path: Path, stream: list[Text]
) -> None:
    fed(learner(initial, tmp_path), stream, cycles=1)
    (tmp_path / "state" / "step-1" / STATE_FILE).write_text(data)
    with pytest.raises(TrainingError, match="is damaged"):
        newest_version(tmp_path)
    with pytest.raises(TrainingError, match="is damaged"):
        learner(initial, tmp_path)
