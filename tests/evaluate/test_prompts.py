"""Reading suites of prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moaspec.errors import DataError
from moaspec.evaluate import Prompt, read_prompts


def write(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"turns": [text, "later"]}) + "\n\n" for text in texts))
    return path


def test_bundled() -> None:
    prompts = read_prompts("bundled")
    assert len(prompts) >= 3
    assert {prompt.suite for prompt in prompts} == {"bundled"}
    assert all(prompt.turns[0].strip() for prompt in prompts)
    assert read_prompts("bundled", limit=2) == prompts[:2]


def test_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "suite.jsonl", "one", "two")
    assert read_prompts(str(path)) == [
        Prompt("suite", "1", ("one", "later")),
        Prompt("suite", "3", ("two", "later")),
    ]


def test_question_ids_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"question_id": 81, "turns": ["x"]}\n')
    assert read_prompts(str(path)) == [Prompt("a", "81", ("x",))]


def test_a_directory_limits_each_file(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", "three")
    write(tmp_path / "a.jsonl", "one", "two")
    (tmp_path / "notes.txt").write_text("not a suite")
    texts = [prompt.turns[0] for prompt in read_prompts(str(tmp_path))]
    assert texts == ["one", "two", "three"]
    limited = read_prompts(str(tmp_path), limit=1)
    assert [(prompt.suite, prompt.turns[0]) for prompt in limited] == [("a", "one"), ("b", "three")]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "3",
        "null",
        "{}",
        '{"turns": []}',
        '{"turns": 3}',
        '{"turns": [3]}',
        '{"turns": [" "]}',
        '{"turns": "a text, not a list"}',
    ],
)
def test_malformed_lines_are_named(line: str, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", "fine")
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=r"bad\.jsonl:3"):
        read_prompts(str(path))


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no \\*"):
        read_prompts(str(tmp_path))
    with pytest.raises(DataError, match="nowhere"):
        read_prompts(str(tmp_path / "nowhere"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no prompts"):
        read_prompts(str(tmp_path))
    (tmp_path / "empty.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="Cannot read"):
        read_prompts(str(tmp_path))
