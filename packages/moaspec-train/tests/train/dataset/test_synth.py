"""Prompts that the target imagines: different ones, whole ones, the same after any interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import chat_tokenizers
from chat_tokenizers import BREAK, END, START, SYSTEM, USER
from moaspec.target.target import Target
from moaspec_core.chat.chat_template import ChatTemplate
from moaspec_core.chat.messages import words
from moaspec_core.engine.engine import Engine
from moaspec_core.engine.request_state import Event
from moaspec_core.errors import DataError, TrainingError
from moaspec_train.dataset.journal import Journal
from moaspec_train.dataset.response_writer import ResponseWriter, WriterOptions
from moaspec_train.dataset.synth import PromptGenerator, synth, user_turn

PLAIN_END = (
    "{% for m in messages %}{{ m.role + '\n' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
)


def imagine(
    target: Target, path: Path, num: int, systems: tuple[str, ...] = (), **changes: Any
) -> list[dict[str, Any]]:
    values = {"max_new_tokens": 40, "batch_size": 3, "group_size": 8, "temperature": 1.0} | changes
    generator = PromptGenerator(target, systems)
    writer = ResponseWriter(
        target, None, WriterOptions(**values), stop_token_ids=generator.stop_token_ids
    )
    with Journal(path, writer.settings(num=num)) as journal:
        synth(writer, generator, journal, num)
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_prompts_are_different_and_whole(tmp_path: Path) -> None:
    rows = imagine(chat_tokenizers.target(), tmp_path / "a.jsonl", 12)
    texts = [row["messages"][-1]["content"] for row in rows]
    assert len({words(text) for text in texts}) == len(texts) == 12
    assert all(text.strip() == text and "<|" not in text for text in texts)
    assert {len(row["messages"]) for row in rows} == {1}


def test_system_prompts_take_turns(tmp_path: Path) -> None:
    rows = imagine(chat_tokenizers.target(), tmp_path / "a.jsonl", 12, ("w12", "w13"))
    systems = [row["messages"][0]["content"] for row in rows if len(row["messages"]) == 2]
    assert set(systems) == {"w12", "w13"}
    assert len(systems) < 12


@pytest.mark.slow
def test_another_seed_gives_other_prompts(tmp_path: Path) -> None:
    target = chat_tokenizers.target()
    first, again, other = (
        imagine(target, tmp_path / f"{i}.jsonl", 6, seed=seed) for i, seed in enumerate((0, 0, 1))
    )
    assert first == again
    assert first != other


@pytest.mark.slow
@pytest.mark.parametrize("stop", [3, 30, 55])
def test_interrupted_and_continued(
    stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = chat_tokenizers.target()
    imagine(target, tmp_path / "whole.jsonl", 12)
    step, calls = Engine.step, []

    def interrupted(self: Engine) -> list[Event]:
        calls.append(1)
        if len(calls) == stop:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        imagine(target, tmp_path / "cut.jsonl", 12)
    imagine(target, tmp_path / "cut.jsonl", 12)
    assert (tmp_path / "cut.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.slow
def test_nothing_new(tmp_path: Path) -> None:
    """Greedy decoding imagines one prompt only."""
    with pytest.raises(TrainingError, match=r"of 5 are in.*temperature"):
        imagine(chat_tokenizers.target(), tmp_path / "a.jsonl", 5, temperature=0.0, group_size=1)


def test_a_limit_of_samples(tmp_path: Path) -> None:
    """It counts those of earlier runs; a higher one continues."""
    target = chat_tokenizers.target()
    generator = PromptGenerator(target)
    options = WriterOptions(max_new_tokens=40, batch_size=3, group_size=8, temperature=1.0)
    writer = ResponseWriter(target, None, options, stop_token_ids=generator.stop_token_ids)
    told: list[tuple[int, int]] = []
    with Journal(tmp_path / "a.jsonl", writer.settings()) as journal:
        for limit in (16, 24):
            with pytest.raises(TrainingError, match=f"limit of {limit} samples is reached"):
                synth(
                    writer,
                    generator,
                    journal,
                    1000,
                    max_samples=limit,
                    report=lambda prompts, samples: told.append((prompts, samples)),
                )
    assert [samples for _, samples in told] == [8, 16, 24]
    assert all(prompts <= samples for prompts, samples in told)


def test_a_template_that_ends_turns_with_plain_text(tmp_path: Path) -> None:
    """A line break ends the user's turn there, and no stop token does."""
    target = chat_tokenizers.target(PLAIN_END.replace("m.content + '\n'", "m.content + ' w63\n'"))
    rows = imagine(target, tmp_path / "a.jsonl", 3, max_new_tokens=60)
    assert all("w63" not in row["messages"][0]["content"] for row in rows)


def test_without_a_chat_template() -> None:
    with pytest.raises(DataError, match=r"no chat template.*data regenerate"):
        PromptGenerator(chat_tokenizers.target(None))


def test_user_turns() -> None:
    turn = user_turn(ChatTemplate(chat_tokenizers.tokenizer(chat_tokenizers.DEFAULT_SYSTEM)))
    assert turn.prefix_ids == (START, SYSTEM, BREAK, 10, 11, END, BREAK, START, USER, BREAK)
    assert (turn.suffix, turn.suffix_ids) == ("<|end|>\n", (END, BREAK))
    turn = user_turn(ChatTemplate(chat_tokenizers.tokenizer()), system="w12")
    assert turn.prefix_ids == (START, SYSTEM, BREAK, 12, END, BREAK, START, USER, BREAK)


@pytest.mark.parametrize("template", ["nothing", "{{ messages[0].content * 2 }}"])
def test_templates_without_a_user_turn(template: str) -> None:
    with pytest.raises(DataError, match="repeats or drops"):
        user_turn(ChatTemplate(chat_tokenizers.tokenizer(template)))
