"""Data as people have them through `moaspec data stats`: used, or refused with line and advice."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import chat_tokenizers
from commands import complaints
from moaspec_core.cli.main import run

Result = tuple[int, str, str]
Q, A = {"role": "user", "content": "w20"}, {"role": "assistant", "content": "w30 w31"}
ROW: dict[str, Any] = {"messages": [Q, A]}
HUMAN, GPT = {"from": "human", "value": "w20"}, {"from": "gpt", "value": "w30 w31"}
CALL = {"function": {"name": "w40", "arguments": '{"w41": 1}'}}


def lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


FORMATS: dict[str, list[dict[str, Any]]] = {
    "openai": [
        ROW,
        {"messages": [Q, {**A, "weight": 0}, Q, A]},
        {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "w12"}]},
                Q,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "x", "content": "w60"},
                A,
            ],
            "tools": [{"type": "function", "function": {"name": "w40"}}],
        },
    ],
    "sharegpt": [{"conversations": [HUMAN, GPT]}, {"conversations": [Q, A]}],
    "llama-factory": [
        {
            "conversations": [
                HUMAN,
                {"from": "function_call", "value": '{"name": "w40", "arguments": {}}'},
                {"from": "observation", "value": "w60"},
                GPT,
            ],
            "system": "w12",
            "tools": json.dumps([{"name": "w40"}]),
        },
        {"conversations": [HUMAN, GPT], "history": [["w21", "w32"]]},
    ],
    "alpaca": [
        {"instruction": "w20", "input": "", "output": "w30 w31"},
        {"instruction": "w20", "input": "w22", "output": "w30 w31", "system": "w12"},
    ],
    "trl": [
        {"prompt": [Q], "completion": [A]},
        {"prompt": "w20", "completion": "w30 w31"},
        {"chosen": [Q, A]},
        {**ROW, "label": True},
    ],
    "others": [
        {"question": "w20", "answer": "w30 w31"},
        {"prompt": "w20", "response": "w30 w31"},
        {"prompt_ids": [20], "response_ids": [30, 31]},
    ],
}
REFUSED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", r"No usable training examples in \S*a.jsonl"),
    "an empty list": (b"[]", "No usable training examples"),
    "cut off": (lines(ROW, ROW)[:-9], "a.jsonl:2: not JSON"),
    "no answer": (lines({"prompt": "w20"}), "a.jsonl:1: no assistant .*regenerate"),
    "no format": (lines({"text": "w20 w30"}), "a.jsonl:1: none of .*has text. Rename"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("target")
    target = chat_tokenizers.target(chat_tokenizers.TOOLS)
    tokenizer: Any = target.tokenizer
    for one in (target.model, tokenizer):
        one.save_pretrained(directory)
    return str(directory)


@pytest.fixture
def stats(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)

    def call(path: Path, *options: str) -> Result:
        monkeypatch.setattr(
            "sys.argv", ["moaspec", "data", "stats", str(path), "--model", model, *options]
        )
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            run()
        shown = capsys.readouterr()
        out, err = (" ".join(text.split()) for text in (shown.out, complaints(shown.err)))
        return int(caught.value.code or 0), out, err

    return call


def test_every_format_in_a_directory(stats: Callable[..., Result], tmp_path: Path) -> None:
    data = tmp_path / "data"  # the cache lies beside it
    data.mkdir()
    for name, rows in FORMATS.items():
        (data / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines(*rows)))
    (data / "README.md").write_text("About it.")
    code, out, err = stats(data, "--json")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert facts["examples"] == sum(map(len, FORMATS.values()))
    assert facts["response_tokens"] >= 2 * facts["examples"]
    assert facts["unused"]["skipped_files"] == [str(data / "README.md")]


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(
    content: bytes, message: str, stats: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    code, _, err = stats(tmp_path / "a.jsonl")
    assert code == 2
    assert re.search(message, err)


def test_what_is_not_used_is_told(stats: Callable[..., Result], tmp_path: Path) -> None:
    """Also when the examples come from the cache."""
    path = tmp_path / "a.jsonl"
    thought = {**A, "reasoning_content": "w50"}
    path.write_bytes(
        lines({**ROW, "category": "x"}, {"messages": [Q, thought]}, {"messages": [Q, A, Q, A]})
    )
    for _ in range(2):
        _, _, err = stats(path, "--max-length", "20")
        assert "not used: category (1 rows), messages.reasoning_content (1 rows)." in err
        assert "1 examples cut to the length." in err
    path.write_bytes(lines(ROW, {"prompt": "w20 " * 40, "response": "w30 w31"}))
    code, out, err = stats(path, "--max-length", "20", "--json")
    assert code == 0
    assert json.loads(out)["unused"]["without_response"] == 1
