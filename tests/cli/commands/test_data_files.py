"""Files as people have them through `moaspec data stats`: used, or refused with line and advice."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import chat_tokenizers
from commands import complaints
from moaspec.data.conversations import read_conversations
from moaspec_core.cli.main import run
from moaspec_core.support.extras import install_command

Result = tuple[int, str, str]
Q, A = {"role": "user", "content": "w20"}, {"role": "assistant", "content": "w30 w31"}
ROW: dict[str, Any] = {"messages": [Q, A]}
HUMAN, GPT = {"from": "human", "value": "w20"}, {"from": "gpt", "value": "w30 w31"}
CALL = {"function": {"name": "w40", "arguments": '{"w41": 1}'}}
TWO = f"{json.dumps(ROW)}\n{json.dumps(ROW)}\n"


def lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


USED: dict[str, tuple[str, bytes, int]] = {
    "json lines": ("a.jsonl", TWO.encode(), 2),
    "no last line break": ("a.jsonl", TWO.strip().encode(), 2),
    "blank lines": ("a.jsonl", TWO.replace("\n", "\n\n \n").encode(), 2),
    "byte order mark": ("a.jsonl", b"\xef\xbb\xbf" + TWO.encode(), 2),
    "windows line breaks": ("a.jsonl", TWO.replace("\n", "\r\n").encode(), 2),
    "json lines in .json": ("a.json", TWO.encode(), 2),
    "a list": ("a.json", json.dumps([ROW, ROW]).encode(), 2),
    "a list over lines": ("a.json", json.dumps([ROW, ROW], indent=2).encode(), 2),
    "a list in .jsonl": ("a.jsonl", json.dumps([ROW, ROW]).encode(), 2),
    "a list with a mark": ("a.json", b"\xef\xbb\xbf" + json.dumps([ROW], indent=1).encode(), 1),
    "gzip": ("a.jsonl.gz", gzip.compress(TWO.encode()), 2),
    "gzip without its name": ("a.jsonl", gzip.compress(TWO.encode()), 2),
    "a list in gzip": ("a.json.gz", gzip.compress(json.dumps([ROW, ROW]).encode()), 2),
    "bzip2": ("a.jsonl.bz2", bz2.compress(TWO.encode()), 2),
    "xz": ("a.jsonl.xz", lzma.compress(TWO.encode()), 2),
    "a comma at the end": ("a.json", f"[{json.dumps(ROW)},]".encode(), 1),
    "any name": ("data", TWO.encode(), 2),
    "sharegpt": ("a.jsonl", lines({"conversations": [HUMAN, GPT]}), 1),
    "llama-factory": (
        "a.json",
        json.dumps(
            [
                {
                    "conversations": [
                        HUMAN,
                        {"from": "function_call", "value": '{"name": "w40", "arguments": {}}'},
                        {"from": "observation", "value": "w60"},
                        GPT,
                    ],
                    "system": "w12",
                    "tools": json.dumps([{"name": "w40"}]),
                }
            ]
        ).encode(),
        1,
    ),
    "history": ("a.jsonl", lines({"conversations": [HUMAN, GPT], "history": [["w21", "w32"]]}), 1),
    "roles in conversations": ("a.jsonl", lines({"conversations": [Q, A]}), 1),
    "alpaca": (
        "a.jsonl",
        lines(
            {"instruction": "w20", "input": "", "output": "w30 w31"},
            {
                "instruction": "w20",
                "input": "w22",
                "output": "w30 w31",
                "system": "w12",
                "history": [["w21", "w32"]],
            },
        ),
        2,
    ),
    "trl": (
        "a.jsonl",
        lines(
            {"prompt": [Q], "completion": [A]},
            {"prompt": [Q], "response": "w30 w31"},
            {"prompt": "w20", "completion": "w30 w31"},
            {"prompt": [Q], "chosen": [A], "rejected": [A]},
            {"chosen": [Q, A], "rejected": [Q, A]},
        ),
        5,
    ),
    "openai tools": (
        "a.jsonl",
        lines(
            {
                "messages": [
                    {"role": "developer", "content": [{"type": "text", "text": "w12"}]},
                    Q,
                    {"role": "assistant", "content": None, "tool_calls": [CALL]},
                    {"role": "tool", "tool_call_id": "x", "content": "w60"},
                    A,
                ],
                "tools": [{"type": "function", "function": {"name": "w40"}}],
            }
        ),
        1,
    ),
    "openai weights": ("a.jsonl", lines({"messages": [Q, {**A, "weight": 0}, Q, A]}), 1),
    "token ids": ("a.jsonl", lines({"prompt_ids": [20], "response_ids": [30, 31]}), 1),
    "a desired answer": ("a.jsonl", lines({**ROW, "label": True}), 1),
    "questions and answers": ("a.jsonl", lines({"question": "w20", "answer": "w30 w31"}), 1),
}
REFUSED: dict[str, tuple[str, bytes, str]] = {
    "empty": ("a.jsonl", b"", r"No usable training examples in \S*a.jsonl"),
    "an undesired answer": ("a.jsonl", lines({**ROW, "label": False}), "a.jsonl:1: 'label' is"),
    "an Arrow file": ("a.arrow", b"ARROW1\0\0\xff\xff\n", "a.arrow:1: .*a binary file.*Parquet"),
    "an empty list": ("a.json", b"[]", "No usable training examples"),
    "cut off": ("a.jsonl", TWO.encode()[:-9], "a.jsonl:2: not JSON"),
    "an object over lines": (
        "a.json",
        json.dumps(ROW, indent=1).encode(),
        "a.json:1: not JSON .* one JSON object a line",
    ),
    "a cut list": (
        "a.json",
        json.dumps([ROW, ROW], indent=1).encode()[:-9],
        "a.json, element 2: not JSON",
    ),
    "two lists": ("a.json", f"[{json.dumps(ROW)}]\n[]".encode(), "a.json: .*more after the list"),
    "a list of texts": (
        "a.json",
        b'["w20", "w30"]',
        "a.json(:|, element )1: expected a JSON object",
    ),
    "python": ("a.jsonl", b"{'prompt': 'w20'}\n", "a.jsonl:1: not JSON .* JSON object a line"),
    "csv": ("a.csv", b"prompt,response\nw20,w30\n", "a.csv:1: not JSON .* Parquet"),
    "a key twice": ("a.jsonl", b'{"prompt": "w20", "prompt": "w21"}', "a.jsonl:1: .*occurs twice"),
    "utf-16": ("a.jsonl", TWO.encode("utf-16"), "a.jsonl:1: .*iconv -f utf-16"),
    "latin-1": (
        "a.jsonl",
        TWO.encode() + b'{"prompt": "K\xf6ln"}\n',
        "a.jsonl:3: not UTF-8 .*iconv",
    ),
    "a zip archive": ("a.zip", b"PK\x03\x04rest", "a.zip:1: a zip archive. Unpack it"),
    "a damaged archive": ("a.jsonl.gz", gzip.compress(TWO.encode())[:-12], "Cannot read the data"),
    "plain text": ("a.jsonl", lines({"text": "w20 w30"}), "a.jsonl:1: none of .*has text. Rename"),
    "no answer": ("a.jsonl", lines({"prompt": "w20"}), "a.jsonl:1: no assistant .*regenerate"),
    "pictures": ("a.jsonl", lines({**ROW, "images": ["x"]}), "a.jsonl:1: 'images' cannot be read"),
    "an unknown speaker": (
        "a.jsonl",
        lines(ROW, {"conversations": [{"from": "alien", "value": "w20"}]}),
        "a.jsonl:2: message 1 must have 'from', one of human",
    ),
    "two systems": (
        "a.jsonl",
        lines({"system": "w12", "messages": [{"role": "system", "content": "w13"}, Q, A]}),
        "a.jsonl:1: .*Keep one of them",
    ),
    "tools that are none": (
        "a.jsonl",
        lines({**ROW, "tools": "w40"}),
        "a.jsonl:1: 'tools' must be",
    ),
    "a number as history": ("a.jsonl", lines({**ROW, "history": [3]}), "a.jsonl:1: 'history' must"),
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


@pytest.mark.slow
@pytest.mark.parametrize("name", USED)
def test_used(name: str, stats: Callable[..., Result], tmp_path: Path) -> None:
    file, content, examples = USED[name]
    (tmp_path / file).write_bytes(content)
    code, out, err = stats(tmp_path / file, "--json")
    assert (code, err) == (0, "")
    values = json.loads(out)
    assert values["examples"] == examples
    assert values["response_tokens"] >= 2 * examples


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, stats: Callable[..., Result], tmp_path: Path) -> None:
    import re

    file, content, message = REFUSED[name]
    (tmp_path / file).write_bytes(content)
    code, _, err = stats(tmp_path / file)
    assert code == 2
    assert re.search(message, err)
    assert file in err or "No usable" in err


def test_a_directory(stats: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for file in ("data/a.jsonl", "b.json"):
        (tmp_path / file).write_text(TWO)
    (tmp_path / "README.md").write_text("About it.")
    (tmp_path / ".hidden").write_text("x")
    code, out, err = stats(tmp_path)
    assert code == 0
    assert out.startswith("4 examples")
    assert f"Files that hold no data: {tmp_path / 'README.md'}." in err


def test_what_is_not_used_is_told(stats: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    thought = {**A, "reasoning_content": "w50"}
    path.write_bytes(
        lines({**ROW, "category": "x"}, {"messages": [Q, thought]}, {"messages": [Q, A, Q, A]})
    )
    _, _, err = stats(path, "--max-length", "20")
    assert "not used: category (1 rows), messages.reasoning_content (1 rows)." in err
    assert "1 examples cut to the length." in err
    path.write_bytes(lines(ROW, {"prompt": "w20 " * 40, "response": "w30 w31"}))
    code, out, err = stats(path, "--max-length", "20", "--json")
    assert code == 0
    assert json.loads(out)["unused"]["without_response"] == 1


def test_tables_add_no_keys(tmp_path: Path) -> None:
    """Two tools of a column have each other's parameters, as null."""
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    names = ({"city": {"type": "string"}}, {"day": {"type": "integer"}})
    tools = [
        {"name": f"w4{i}", "parameters": {"type": "object", "properties": properties}}
        for i, properties in enumerate(names)
    ]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{**ROW, "tools": tools}]), path)
    (conversation,) = read_conversations([str(path)])
    found = [tool["function"]["parameters"]["properties"] for tool in conversation.tools]
    assert found == list(names)


def test_parquet_and_zstd(stats: Callable[..., Result], tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    rows = [{**ROW, "system": None}, {**ROW, "system": "w12"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert stats(path)[1].startswith("2 examples")
    path.write_bytes(path.read_bytes()[:-20])
    assert "Cannot read the data" in stats(path)[2]
    packed = tmp_path / "a.jsonl.zst"
    frame = pyarrow.compress(TWO.encode(), codec="zstd", asbytes=True)
    packed.write_bytes(frame + frame)
    assert stats(packed)[1].startswith("4 examples")
    for damaged in (frame[:-4], frame[:10] + b"xxxx" + frame[14:]):
        packed.write_bytes(damaged)
        assert "Cannot read the data" in stats(packed)[2]


@pytest.mark.parametrize("start", [b"PAR1", b"\x28\xb5\x2f\xfd"])
def test_packages_that_are_missing_are_named(
    start: bytes,
    stats: Callable[..., Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    path = tmp_path / "a.bin"
    path.write_bytes(start + b"rest")
    code, _, err = stats(path)
    assert code == 2
    assert f"`pyarrow`: {install_command('moaspec[data]')}" in err
