"""Training examples from rows of any shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import chat_tokenizers
import tiny
from moaspec.data.conversations import ReadReport
from moaspec.data.loss_mask import masked_tokens
from moaspec_core.errors import DataError
from moaspec_train.dataset import read_examples as read_examples_module
from moaspec_train.dataset.examples import Example
from moaspec_train.dataset.read_examples import read_examples

ASKED = (0, 3, 8, 20, 1, 8, 0, 4, 8)
TALK = {"messages": list(chat_tokenizers.talk("w20", "w30 w31").messages)}


def read(path: Path, rows: list[Any], **options: Any) -> list[Example]:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    values = {"vocab_size": tiny.VOCAB, "max_length": 50} | options
    return read_examples([path], **values)


def test_messages_are_masked_by_the_chat_template(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "tokenizer": chat_tokenizers.tokenizer(),
        "stop_token_ids": {chat_tokenizers.END},
    }
    sharegpt = {
        "conversations": [{"from": "human", "value": "w20"}, {"from": "gpt", "value": "w30 w31"}]
    }
    alpaca = {"instruction": "w20", "output": "w30 w31"}
    examples = read(tmp_path / "a.jsonl", [TALK, sharegpt, alpaca], **options)
    assert examples == [Example(ASKED, (30, 31, 1))] * 3


def test_turns_of_one_conversation_are_joined(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "prompt_ids": [1, 2], "response_ids": [3, 4]},
        {"id": "a", "prompt_ids": [1, 2, 3, 4, 5], "response_ids": [6, 7]},
        {"id": "b", "prompt_ids": [1, 2, 3, 4, 5, 6, 7, 8], "response_ids": [9, 9]},
        {"id": "b", "prompt_ids": [1, 2], "response_ids": [8, 8]},
        {"prompt_ids": [1], "response_ids": [2, 2]},
        {"prompt_ids": [1, 2, 2], "response_ids": [2, 2]},
    ]
    assert read(tmp_path / "a.jsonl", rows) == [
        Example((1, 2), (3, 4), (5,), (6, 7)),
        Example((1, 2, 3, 4, 5, 6, 7, 8), (9, 9)),
        Example((1, 2), (8, 8)),
        Example((1,), (2, 2)),
        Example((1, 2, 2), (2, 2)),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "not JSON"),
        ({"prompt_ids": [1]}, "without 'response_ids'"),
        ({"prompt": "w20"}, "no assistant turn"),
        ({"prompt_ids": [1], "response_ids": [2, 64]}, "64 is outside"),
    ],
    ids=str,
)
def test_malformed_rows_are_named_or_skipped(row: Any, message: str, tmp_path: Path) -> None:
    rows = [TALK, row, TALK]
    options: dict[str, Any] = {
        "tokenizer": chat_tokenizers.tokenizer(),
        "stop_token_ids": {chat_tokenizers.END},
    }
    with pytest.raises(DataError, match=rf"a\.jsonl:2: .*{message}"):
        read(tmp_path / "a.jsonl", rows, **options)
    seen: list[DataError] = []
    assert len(read(tmp_path / "a.jsonl", rows, on_malformed=seen.append, **options)) == 2
    assert len(seen) == 1


def test_messages_need_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tokenizer"):
        read(tmp_path / "a.jsonl", [TALK])


def test_rows_whose_turns_all_carry_no_loss_are_counted(tmp_path: Path) -> None:
    report = ReadReport()
    rows = [TALK, {**TALK, "train": False}]
    examples = read(
        tmp_path / "a.jsonl",
        rows,
        tokenizer=chat_tokenizers.tokenizer(),
        stop_token_ids={chat_tokenizers.END},
        report=report,
    )
    assert examples == [Example(ASKED, (30, 31, 1))]
    assert (report.without_response, report.turns_without_loss) == (1, 1)
    assert "1 examples left out: no response with loss in the length." in report.lines()


def test_a_second_reading_does_not_tokenise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the same rows, tokenizer and settings; a malformed row is reported each time."""
    path, passes = tmp_path / "a.jsonl", list[str]()

    def counted(template: Any, conversation: Any, *options: Any) -> Any:
        passes.append(conversation.where)
        return masked_tokens(template, conversation, *options)

    monkeypatch.setattr(read_examples_module, "masked_tokens", counted)
    monkeypatch.setenv("MOASPEC_CACHE", str(tmp_path / "cache"))
    options: dict[str, Any] = {
        "tokenizer": chat_tokenizers.tokenizer(),
        "stop_token_ids": {chat_tokenizers.END},
    }
    ids = {"prompt_ids": [5], "response_ids": [6, 7]}
    rows, reports = [TALK, {**TALK, "train": False}, ids], [ReadReport(), ReadReport()]
    first, second = (read(path, rows, report=report, **options) for report in reports)
    assert first == second == [Example(ASKED, (30, 31, 1)), Example((5,), (6, 7))]
    assert reports[0] == reports[1] != ReadReport()
    assert len(passes) == 2

    other = chat_tokenizers.tokenizer()
    other.chat_template += " "
    for changed in ({"max_length": 49}, {"stop_token_ids": ()}, {"tokenizer": other}):
        read(path, rows, **options | changed)
    read(path, [*rows, TALK], **options)
    assert len(passes) == 2 + 3 * 2 + 3

    for _ in range(2):
        assert read(path, [TALK, "{"], on_malformed=lambda _: None, **options) == first[:1]
    assert len(passes) == 13
    for file in (tmp_path / "cache").rglob("*.arrow"):
        file.write_bytes(file.read_bytes()[:-9])
    assert read(path, rows, **options) == first
    assert "reading the data again" in caplog.text
