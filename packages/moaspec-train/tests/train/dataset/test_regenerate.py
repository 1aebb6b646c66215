"""The target writes responses: right ones, in order, and the same after any interruption."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

import chat_tokenizers
import moaspec
import tiny
from moaspec.data.conversations import Conversation
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_core.chat.messages import normal_messages, normal_tool
from moaspec_core.engine.engine import Engine
from moaspec_core.engine.request_state import Event
from moaspec_core.errors import DataError, InputError
from moaspec_train.dataset.examples import Example
from moaspec_train.dataset.journal import Journal
from moaspec_train.dataset.read_examples import read_examples
from moaspec_train.dataset.regenerate import (
    check_prompts,
    fingerprint,
    regenerate,
    with_system_prompts,
)
from moaspec_train.dataset.response_writer import ResponseWriter, WriterOptions

TALKS = [
    chat_tokenizers.talk("w20"),
    chat_tokenizers.talk("w21 w22", "w50 w51", "w23", "w52", "w24 w25"),
    chat_tokenizers.talk("w26 w27 w28", system="w12 w13"),
    Conversation(where="here:4", name="ids", prompt_ids=(40, 41, 42)),
    chat_tokenizers.talk("w29", "w53"),
]
NEW_TOKENS = 12
Row = dict[str, Any]


@pytest.fixture(scope="module")
def target() -> Target:
    """Its seed is one with which turns end at a stop token and at the limit."""
    return chat_tokenizers.target(seed=7)


def write(
    target: Target,
    path: Path,
    *,
    drafter: MoADrafter | None = None,
    conversations: list[Conversation] = TALKS,
    **changes: Any,
) -> list[Row]:
    values = {"max_new_tokens": NEW_TOKENS, "batch_size": 2, "group_size": 3} | changes
    writer = ResponseWriter(target, drafter, WriterOptions(**values))
    with Journal(path, writer.settings(prompts=fingerprint(conversations))) as journal:
        regenerate(writer, conversations, journal)
    return [json.loads(line) for line in path.read_text().splitlines()]


def alone(target: Target, prompt_ids: list[int]) -> moaspec.GenerationResult:
    return moaspec.generate(target, prompt_ids, max_new_tokens=NEW_TOKENS)


def test_rows_are_what_the_target_writes_alone(target: Target, tmp_path: Path) -> None:
    rows = write(target, tmp_path / "a.jsonl")
    for row in rows:
        expected = alone(target, row["prompt_ids"])
        assert row["response_ids"] == expected.token_ids
        assert row["stop_reason"] == expected.stop_reason
    assert {row["stop_reason"] for row in rows} == {"stop_token", "max_new_tokens"}
    assert list(dict.fromkeys(row["id"] for row in rows)) == ["0", "1", "2", "ids", "4"]
    assert {row["source"] for row in rows} == {"here:1", "here:4"}


def test_prompts_come_from_the_chat_template(target: Target, tmp_path: Path) -> None:
    rows = write(target, tmp_path / "a.jsonl")
    by_id = {row["id"]: row for row in rows if row["turn"] == 0}
    assert by_id["0"]["prompt_ids"] == [0, 3, 8, 20, 1, 8, 0, 4, 8]
    assert by_id["2"]["prompt_ids"][:7] == [0, 2, 8, 12, 13, 1, 8]
    assert by_id["ids"]["prompt_ids"] == [40, 41, 42]
    assert "messages" not in by_id["ids"]
    decode = tiny_text(target)
    answer = {"role": "assistant", "content": decode(by_id["0"]["response_ids"])}
    assert by_id["0"]["messages"] == [{"role": "user", "content": "w20"}, answer]


def tiny_text(target: Target) -> Any:
    tokenizer: Any = target.tokenizer
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def ending(**changes: Any) -> Target:
    """A target that writes words and ends its turns after a few; with this seed, none at once."""
    target = chat_tokenizers.target(seed=1, **changes)
    head: Any = target.model.get_output_embeddings()
    end = head.weight[chat_tokenizers.END].clone()
    head.weight[: chat_tokenizers.CALL + 1] = 0
    # Whenever this token's logit is positive, it is now one of the largest.
    head.weight[chat_tokenizers.END] = 3 * end
    return target


def test_later_turns_build_on_what_the_target_wrote(tmp_path: Path) -> None:
    target = ending()
    rows = write(target, tmp_path / "a.jsonl", conversations=[TALKS[1], TALKS[0]])
    turns = [row for row in rows if row["id"] == "0"]
    assert [row["turn"] for row in turns] == [0, 1, 2]
    assert [len(row["messages"]) for row in turns] == [2, 4, 6]
    answers = [message["content"] for message in turns[2]["messages"][1::2]]
    assert answers == [tiny_text(target)(row["response_ids"]) for row in turns]
    assert turns[1]["messages"][:2] == turns[0]["messages"]
    first, *_ = read_examples([tmp_path / "a.jsonl"], vocab_size=tiny.VOCAB, max_length=200)
    assert first.pieces[1::2] == tuple(tuple(row["response_ids"]) for row in turns)
    assert first.token_ids == tuple(turns[2]["prompt_ids"] + turns[2]["response_ids"])


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_any_batch_and_a_drafter_give_the_same_rows(
    batch_size: int, target: Target, tmp_path: Path
) -> None:
    plain = write(target, tmp_path / "a.jsonl")
    drafter = tiny.random_drafter(target)
    drafted = write(
        target, tmp_path / "b.jsonl", drafter=drafter, batch_size=batch_size, group_size=4
    )
    assert drafted == plain


def test_prompts_of_like_length_are_decoded_together(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their order in the file, in which the rows stay."""
    lengths: list[int] = []
    real = Engine.add

    def add(self: Engine, prompt_ids: Sequence[int], **options: Any) -> int:
        lengths.append(len(prompt_ids))
        return real(self, prompt_ids, **options)

    monkeypatch.setattr(Engine, "add", add)
    ids = [list(range(20, 20 + length)) for length in (3, 30, 4, 29, 5, 28)]
    conversations = [Conversation(where=str(i), prompt_ids=tuple(x)) for i, x in enumerate(ids)]
    rows = write(target, tmp_path / "a.jsonl", conversations=conversations, group_size=6)
    assert lengths == [30, 29, 28, 5, 4, 3]
    assert [row["prompt_ids"] for row in rows] == ids


def test_sampled_rows(target: Target, tmp_path: Path) -> None:
    """Each conversation has noise of its own, and the seed decides it."""
    same = [TALKS[0]] * 4
    settings: dict[str, Any] = {"conversations": same, "temperature": 1.0, "top_p": 0.9}
    rows = write(target, tmp_path / "a.jsonl", **settings)
    assert len({tuple(row["response_ids"]) for row in rows}) == 4
    drafter = tiny.random_drafter(target)
    again = write(target, tmp_path / "b.jsonl", drafter=drafter, batch_size=4, **settings)
    assert again == rows
    assert write(target, tmp_path / "c.jsonl", seed=1, **settings) != rows


@pytest.mark.parametrize("stop", [1, 2, 5, 9, 14, 25])
def test_interrupted_and_continued(
    stop: int, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(target, tmp_path / "whole.jsonl")
    step, calls = Engine.step, []

    def interrupted(self: Engine) -> list[Event]:
        calls.append(1)
        if len(calls) == stop:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(target, tmp_path / "cut.jsonl")
    write(target, tmp_path / "cut.jsonl")
    assert (tmp_path / "cut.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    before = len(calls)
    write(target, tmp_path / "cut.jsonl")
    assert len(calls) == before


def _interrupt_and_resume(target: Target, values: dict[str, Any], path: Path) -> int:
    """Write until a patched method interrupts, then go on; the number of conversations kept."""
    kept = 0
    for run in range(2):
        writer = ResponseWriter(target, None, WriterOptions(**values))
        with Journal(path, writer.settings(prompts=fingerprint(TALKS))) as journal:
            if run:
                regenerate(writer, TALKS, journal)
                continue
            with pytest.raises(KeyboardInterrupt):
                regenerate(writer, TALKS, journal)
            journal.keep(writer.finished)
            kept = len(journal.kept)
    return kept


@pytest.mark.parametrize("stop", [9, 14, 25])
def test_finished_conversations_of_a_group_are_kept(
    stop: int, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One group has all conversations; the rows are those of a run without a stop."""
    write(target, tmp_path / "whole.jsonl", group_size=5)
    values = {"max_new_tokens": NEW_TOKENS, "batch_size": 2, "group_size": 5}
    path, calls, step = tmp_path / "cut.jsonl", [0], Engine.step

    def interrupted(self: Engine) -> list[Event]:
        calls[0] += 1
        if calls[0] == stop:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    assert 0 < _interrupt_and_resume(target, values, path) < len(TALKS)
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_interrupted_while_a_group_is_saved(
    call: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after the moment from which the group counts, no conversation is repeated."""
    write(target, tmp_path / "whole.jsonl")
    values = {"max_new_tokens": NEW_TOKENS, "batch_size": 2, "group_size": 3}
    owner: Any = os if call == "fsync" else Path
    real, add, path = getattr(owner, call), Engine.add, tmp_path / "cut.jsonl"
    asked: list[Any] = []

    def counted(self: Engine, prompt_ids: Sequence[int], **options: Any) -> int:
        asked.append(prompt_ids)
        return add(self, prompt_ids, **options)

    def interrupted(*given: Any) -> Any:
        done = real(*given)
        if asked:
            monkeypatch.setattr(owner, call, real)
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(Engine, "add", counted)
    monkeypatch.setattr(owner, call, interrupted)
    _interrupt_and_resume(target, values, path)
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert len(asked) == len(path.read_text().splitlines())


def test_other_prompts_do_not_continue_a_file(target: Target, tmp_path: Path) -> None:
    write(target, tmp_path / "a.jsonl")
    with pytest.raises(InputError, match="prompts="):
        write(target, tmp_path / "a.jsonl", conversations=TALKS[:4])
    with pytest.raises(InputError, match="max_new_tokens=12, now it is 13"):
        write(target, tmp_path / "a.jsonl", max_new_tokens=13)


def test_tool_turns_stay_and_later_ones_are_written(tmp_path: Path) -> None:
    target = chat_tokenizers.target(chat_tokenizers.TOOLS)
    messages = normal_messages(
        [
            {"role": "user", "content": "w20"},
            {"role": "assistant", "content": "", "tool_calls": [{"name": "w40"}]},
            {"role": "tool", "content": "w60"},
        ]
    )
    tool = normal_tool({"name": "w40"})
    asked = Conversation(where="here:1", messages=messages, tools=(tool,))
    (row,) = write(target, tmp_path / "a.jsonl", conversations=[asked])
    assert row["messages"][:3] == list(messages)
    assert row["tools"] == [tool]
    assert row["prompt_ids"][:5] == [0, 2, 8, 40, 1]
    assert row["response_ids"] == alone(target, row["prompt_ids"]).token_ids


def test_unanswered_questions_are_answered_one_by_one(tmp_path: Path) -> None:
    messages = tuple({"role": "user", "content": text} for text in ("w20", "w21"))
    turns = Conversation(where="here:1", messages=messages)
    rows = write(ending(), tmp_path / "a.jsonl", conversations=[turns])
    assert [len(row["messages"]) for row in rows] == [2, 4]


def test_a_full_context_ends_a_conversation(tmp_path: Path) -> None:
    target = ending(max_position_embeddings=20)
    rows = write(target, tmp_path / "a.jsonl", conversations=[TALKS[1]])
    assert [row["turn"] for row in rows] == [0]


def test_what_cannot_be_asked_is_told_first() -> None:
    target = chat_tokenizers.target(max_position_embeddings=20)
    bad = [
        chat_tokenizers.talk("w20 " * 30),
        Conversation(where="here:2", prompt_ids=(1, 99)),
        Conversation(where="here:3", messages=({"role": "assistant", "content": "w1"},)),
    ]
    seen: list[DataError] = []
    assert check_prompts(target, [TALKS[0], *bad], seen.append) == [TALKS[0]]
    assert [str(error)[:6] for error in seen] == ["here:1", "here:2", "here:3"]


def test_system_prompts() -> None:
    talks = [chat_tokenizers.talk("w20")] * 200
    given = with_system_prompts(talks, ["w12", "w13"], without=0.5, seed=3)
    systems = [c.messages[0]["content"] if len(c.messages) == 2 else None for c in given]
    # 200 draws: a share of one half has a standard deviation of 7.
    assert 70 < systems.count(None) < 130
    assert systems.count("w12") > 20
    assert systems.count("w13") > 20
    assert with_system_prompts(talks, ["w12", "w13"], without=0.5, seed=3) == given
    assert with_system_prompts(talks, [], without=0.5, seed=3) == talks
    kept = [TALKS[2], TALKS[3]]
    assert with_system_prompts(kept, ["w12"], without=0.0, seed=3) == kept
    plain = [dataclasses.replace(talks[0], plain=True)]
    assert not with_system_prompts(plain, ["w12"], without=0.0, seed=3)[0].plain


def test_rows_are_training_data(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = write(target, path)
    examples = read_examples([path], vocab_size=tiny.VOCAB, max_length=200)
    assert examples[0] == Example(rows[0]["prompt_ids"], rows[0]["response_ids"])


@pytest.mark.parametrize("name", ["max_new_tokens", "batch_size", "group_size"])
def test_sizes_are_checked(name: str) -> None:
    values: dict[str, Any] = {name: 0}
    with pytest.raises(InputError, match=name):
        WriterOptions(**values)


def test_the_models_own_defaults_hold(target: Target, tmp_path: Path) -> None:
    """A resumed run must find the same ones."""
    talk = [Conversation(where="here:1", name="ids", prompt_ids=(40, 41, 42))]
    plain = write(target, tmp_path / "plain.jsonl", conversations=talk)
    before = target.model.generation_config
    asked = {"repetition_penalty": 1.5, "suppress_tokens": list(range(0, 60, 2))}
    target.model.generation_config = GenerationConfig(**asked)
    changed = Target(target.model, target.tokenizer, name=target.name)
    target.model.generation_config = before
    path = tmp_path / "rows.jsonl"
    (row,) = write(changed, path, conversations=talk)
    expected = moaspec.generate(changed, (40, 41, 42), max_new_tokens=NEW_TOKENS)
    assert row["response_ids"] == expected.token_ids != plain[0]["response_ids"]
    with pytest.raises(InputError, match="settings"):
        write(target, path, conversations=talk)
