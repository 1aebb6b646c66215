"""Reading suites of prompts."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moaspec.evaluate.prompt_suites import NAMED, Prompt, read_prompts
from moaspec_core.errors import DataError


def write(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"turns": [text, "later"]}) + "\n\n" for text in texts))
    return path


def test_bundled_prompts_about_code() -> None:
    prompts = read_prompts("bundled-code")
    assert [one.category for one in prompts] == ["function", "types", "bug", "tests", "explain"]
    for prompt in prompts[1:]:
        code = prompt.turns[0].partition("```python\n")[2].removesuffix("```")
        compile(code, prompt.category, "exec")


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


def test_prompts_of_a_list_are_numbered(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"turns": ["x"]}, {"turns": ["y"]}]')
    prompts = read_prompts(str(tmp_path / "a.json"))
    assert [prompt.question_id for prompt in prompts] == ["1", "2"]


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
        '{"turns": ' + "[" * 100_000,
        '{"turns": ["half \\ud800"]}',
    ],
)
def test_malformed_lines_are_named(line: str, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", "fine")
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=r"bad\.jsonl:3"):
        read_prompts(str(path))


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no data"):
        read_prompts(str(tmp_path))
    with pytest.raises(DataError, match="nowhere"):
        read_prompts(str(tmp_path / "nowhere"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no prompts"):
        read_prompts(str(tmp_path))
    (tmp_path / "empty.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"empty\.jsonl:1: .*UTF-16"):
        read_prompts(str(tmp_path))


def test_a_limit_is_spread_over_categories(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    rows = [{"category": c, "turns": [f"{c}{i}"]} for c in "abc" for i in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)))
    texts = [prompt.turns[0] for prompt in read_prompts(str(path), limit=4)]
    assert texts == ["a0", "a1", "b0", "c0"]
    assert len(read_prompts(str(path), limit=99)) == 9


def test_turns_references_and_plain_prompts(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"turns": ["x", "y", "z"], "reference": ["1", "2"]}, {"prompt": "p", "reference": "r"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second = read_prompts(str(path), max_turns=2)
    assert (first.turns, first.references) == (("x", "y"), ("1", "2"))
    assert (second.turns, second.references) == (("p",), ("r",))


def test_references_of_other_types(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"prompt": "p", "reference": value} for value in (42, 0, 1.5, True, [1, "2"], None)]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = [prompt.references for prompt in read_prompts(str(path))]
    assert found == [("42",), ("0",), ("1.5",), ("True",), ("1", "2"), ()]


def test_texts_with_other_separators_of_lines(tmp_path: Path) -> None:
    """JSON may hold them raw; the file may begin with a byte order mark and have CRLF."""
    path = tmp_path / "a.jsonl"
    path.write_bytes('\ufeff{"prompt": "a\u2028b\u0085c"}\r\n{"prompt": "d"}\r\n'.encode())
    texts = [prompt.turns[0] for prompt in read_prompts(str(path))]
    assert texts == ["a\u2028b\u0085c", "d"]


def test_suites_are_read_as_all_data_is(tmp_path: Path) -> None:
    """Compressed, a JSON list, Parquet, and messages of several shapes."""
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"conversations": [{"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]},
        {"question": "e", "context": "f", "answer": 3, "id": "own"},
    ]
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "lines.jsonl.gz").write_bytes(
        gzip.compress("\n".join(map(json.dumps, rows)).encode())
    )
    lines, listed = (read_prompts(str(tmp_path))[part] for part in (slice(3), slice(3, 6)))
    assert {prompt.suite for prompt in lines} == {"lines"}
    assert [prompt.turns for prompt in lines] == [("a",), ("c",), ("e\n\nf",)]
    assert [prompt.references for prompt in lines] == [("b",), ("d",), ("3",)]
    assert [prompt.turns for prompt in listed] == [prompt.turns for prompt in lines]
    assert listed[2].question_id == "own"


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
            "system",
        ),
        ({"prompt": "p", "tools": [{"name": "f"}]}, "tools"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "no user"),
    ],
)
def test_what_suites_cannot_have_is_refused(row: dict[str, Any], what: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(DataError, match=rf"a\.jsonl:1: expected turns of a user, got {what}"):
        read_prompts(str(path))


def test_named_suites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOASPEC_SUITES", raising=False)
    for name in NAMED:
        with pytest.raises(DataError, match=r"\$MOASPEC_SUITES names \(not set\)"):
            read_prompts(name)
    monkeypatch.setenv("MOASPEC_SUITES", str(tmp_path))
    with pytest.raises(DataError, match="spec_bench"):
        read_prompts("spec-bench")
    write(tmp_path / "spec_bench.jsonl", "one")
    assert read_prompts("spec-bench")[0].suite == "spec-bench"
    directory = tmp_path / "paper_eval"
    directory.mkdir()
    for name in NAMED["paper"].files[1:]:
        write(directory / f"{name}.jsonl", name)
    with pytest.raises(DataError, match="lacks mt_bench"):
        read_prompts("paper")
    write(directory / "mt_bench.jsonl", "x")
    write(directory / "another.jsonl", "x")
    assert {prompt.suite for prompt in read_prompts("paper")} == set(NAMED["paper"].files)


def test_an_id_that_occurs_twice(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"question_id": 1, "turns": ["x"]}\n' * 2)
    with pytest.raises(DataError, match=r"a\.jsonl:2.*twice"):
        read_prompts(str(path))


ROWS: dict[str, list[dict[str, Any]]] = {
    "test": [
        {"question": "How many?", "answer": "3 #### 3"},
        {"instruction": "Sort.", "input": "b a", "output": "a b"},
        {"prompt": ["first", "second"], "task_id": "T/1", "category": "talk"},
    ],
    "empty": [],
    "bad": [{"text": "?"}],
}


@pytest.fixture
def _hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(
        name: str, configuration: str | None, *, split: str, **_: Any
    ) -> Iterator[Any]:
        if (name, configuration) != ("openai/gsm8k", "main"):
            raise ConnectionError("the hub cannot be reached")
        return iter(ROWS[split])

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


@pytest.mark.usefixtures("_hub")
def test_data_sets_of_the_hub() -> None:
    first, second, third = read_prompts("hub:openai/gsm8k:main")
    assert first == Prompt("gsm8k", "1", ("How many?",), "", ("3 #### 3",))
    assert (second.turns, second.references) == (("Sort.\n\nb a",), ("a b",))
    assert third == Prompt("gsm8k", "T/1", ("first", "second"), "talk")
    assert read_prompts("hub:openai/gsm8k:main@test", limit=1) == [first]


@pytest.mark.usefixtures("_hub")
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hub:openai/gsm8k", "the hub cannot be reached"),
        ("hub:openai/gsm8k:main@empty", "has no rows"),
        ("hub:openai/gsm8k:main@bad", "@bad:1: expected 'turns'"),
    ],
)
def test_data_sets_that_cannot_be_had(source: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_prompts(source)
