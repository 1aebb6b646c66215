"""What is kept while the target writes is what training computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import chat_tokenizers
import tiny
from moaspec.data.conversations import Conversation
from moaspec.target.target import Target
from moaspec_core.errors import InputError
from moaspec_train.dataset.answer_keeper import AnswerKeeper
from moaspec_train.dataset.examples import collate
from moaspec_train.dataset.journal import Journal
from moaspec_train.dataset.read_examples import read_examples
from moaspec_train.dataset.regenerate import fingerprint, regenerate
from moaspec_train.dataset.response_writer import ResponseWriter, WriterOptions
from moaspec_train.students.target_activations import LayerMeanCache, TargetActivations

TALKS = [
    chat_tokenizers.talk("w20"),
    chat_tokenizers.talk("w21 w22", "w50 w51", "w23", "w52", "w24 w25"),
    Conversation(where="here:3", name="ids", prompt_ids=(40, 41, 42)),
    chat_tokenizers.talk("w26 w27 w28", system="w12 w13"),
]


@pytest.fixture(scope="module")
def target() -> Target:
    """Its seed is one with which turns end at a stop token and at the limit."""
    return chat_tokenizers.target(seed=7)


def write(target: Target, path: Path, keeper: AnswerKeeper | None) -> list[dict[str, Any]]:
    options = WriterOptions(max_new_tokens=12, batch_size=2, group_size=3)
    writer = ResponseWriter(target, None, options, keeper=keeper)
    with Journal(path, writer.settings(prompts=fingerprint(TALKS))) as journal:
        regenerate(writer, TALKS, journal)
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("max_length", [1000, 14])
def test_training_reads_what_was_kept(
    max_length: int, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole conversations, also of several turns, and cut ones; the target reads none again."""
    drafter, kept = tiny.random_drafter(target), tmp_path / "kept"
    keeper = AnswerKeeper(target, drafter, kept, max_length=max_length)
    rows = write(target, tmp_path / "a.jsonl", keeper)
    assert rows == write(target, tmp_path / "b.jsonl", None)
    examples = read_examples(
        [tmp_path / "a.jsonl"], vocab_size=target.vocab_size, max_length=max_length
    )
    assert max_length == 1000 or max(map(len, examples)) == max_length
    batch = collate(examples, range(len(examples)))
    real = batch.attention_mask_BT.bool()
    activations = TargetActivations(target, examples, None)
    expected = activations.passes(batch)
    means = drafter.encoder.mean_over_layers(expected.kv_BTLK)
    cache = LayerMeanCache(activations, drafter.encoder, kept, bf16=True)
    monkeypatch.setattr(target, "capture", None)
    mean_BTK, found = cache.read(batch)
    for now, then in ((mean_BTK, means), (found.hidden_BTE, expected.hidden_BTE)):
        error = (now[real].float() - then[real].float()).norm(dim=1) / then[real].norm(dim=1)
        assert error.max() < 0.02  # of bf16


def test_an_answer_is_kept_once(target: Target, tmp_path: Path) -> None:
    """Also where a killed run wrote the same answer before."""
    sizes = []
    for number in range(2):
        drafter = tiny.random_drafter(target)
        keeper = AnswerKeeper(target, drafter, tmp_path / "kept", max_length=1000)
        write(target, tmp_path / f"{number}.jsonl", keeper)
        sizes.append(sum(path.stat().st_size for path in tmp_path.rglob("*.data")))
    assert sizes[0] == sizes[1] > 0


def test_drafters_that_need_more_are_refused(target: Target, tmp_path: Path) -> None:
    drafter = tiny.random_drafter(target, exits=(1,))
    with pytest.raises(InputError, match="reuses 1 layers"):
        AnswerKeeper(target, drafter, tmp_path, max_length=1000)


def test_targets_whose_keys_change_are_refused(tmp_path: Path) -> None:
    """LongRoPE: when a text grows beyond a length, all its keys are others."""
    target = tiny.target("phi3")
    with pytest.raises(InputError, match="cannot be kept"):
        AnswerKeeper(target, tiny.random_drafter(target), tmp_path, max_length=1000)
