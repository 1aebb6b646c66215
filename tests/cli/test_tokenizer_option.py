"""--tokenizer: a directory in place of a GGUF file's tokenizer that is not known here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gguf_files
from commands import Cli
from gguf_files import KEY
from moaspec.target.weights.gguf_tokenizer import read_tokenizer


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"pre": "not-known"}, "'not-known'"),
        ({"tokens": ["a"] * 300}, "Two of its tokens are 'a'"),
        ({"merges": [1]}, "must be a list of texts"),
    ],
)
def test_a_file_with_an_unknown_tokenizer_generates(
    damage: dict[str, Any], said: str, cli: Cli, tmp_path: Path
) -> None:
    fields = gguf_files.byte_level("qwen2")
    read_tokenizer(fields, name="x").save_pretrained(tmp_path / "words")
    damaged = fields | {f"{KEY}{name}": value for name, value in damage.items()}
    file = gguf_files.write(tmp_path / "x.gguf", damaged)
    asked = ("generate", "a", "--model", str(file), "--dtype", "float32", "--max-new-tokens", "2")
    refused = cli(*asked)
    assert refused.code == 2
    assert said in refused.error
    assert "--tokenizer DIR" in refused.error
    assert cli(*asked, "--tokenizer", str(tmp_path / "words")).code == 0
    assert cli(*asked).error == refused.error  # the converted file is kept
    wrong = cli(*asked, "--tokenizer", str(tmp_path))
    assert wrong.code == 2
    assert "holds no tokenizer.json" in wrong.error


def test_a_file_without_a_template_takes_one(cli: Cli, tmp_path: Path) -> None:
    """Without one the prompt is plain text, which is told; a wrong file is told, too."""
    file = gguf_files.write(tmp_path / "x.gguf", gguf_files.byte_level("qwen2"))
    shared = ("--model", str(file), "--dtype", "float32")
    asked = ("generate", "a", *shared, "--max-new-tokens", "2", "--json")
    plain = cli(*asked)
    assert plain.code == 0
    assert "as plain text" in " ".join(plain.err.split())
    refused = cli("chat", *shared)
    assert "--chat-template" in " ".join(refused.err.split())
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}<<{{ message.content }}>>{% endfor %}")
    given = cli(*asked, "--chat-template", str(template))
    assert given.code == 0, given.error
    assert "plain text" not in given.err
    prompt = [json.loads(one.out)["prompt_tokens"] for one in (plain, given)]
    assert prompt[0] < prompt[1]
    wrong_ones = (
        ("{% for", "refuses these messages"),
        ("{{ nobody.knows }}", "refuses"),
        ("a constant", "does not render what a user says"),
        (" ", "is empty"),
    )
    for text, said in wrong_ones:
        template.write_text(text)
        wrong = cli(*asked, "--chat-template", str(template))
        assert wrong.code == 2
        assert said in " ".join(wrong.err.split())
    absent = cli(*asked, "--chat-template", str(tmp_path / "absent"))
    assert absent.code == 2
    assert "Cannot read the chat template" in " ".join(absent.err.split())
    server = cli("target-server", *shared, "--chat-template", str(template))
    assert server.code == 2
    assert "devices send token ids" in " ".join(server.err.split())


def test_writing_and_training_take_a_template(cli: Cli, tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "x.gguf", gguf_files.byte_level("qwen2"))
    template, prompts = tmp_path / "template.jinja", tmp_path / "prompts.jsonl"
    template.write_text("{% for message in messages %}<<{{ message.content }}>>{% endfor %}")
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}))
    out = tmp_path / "answers.jsonl"
    shared = ("--model", str(file), "--dtype", "float32", "--max-new-tokens", "4")
    asked = ("data", "regenerate", str(prompts), "--out", str(out), *shared)
    assert cli(*asked).code == 2  # a conversation needs a template
    read_tokenizer(gguf_files.byte_level("qwen2"), name="x").save_pretrained(tmp_path / "words")
    words = ("--tokenizer", str(tmp_path / "words"))
    given = cli(*asked, *words, "--chat-template", str(template))
    assert given.code == 0, given.error
    row = json.loads(out.read_text())
    tokenizer = read_tokenizer(gguf_files.byte_level("qwen2"), name="x")
    assert tokenizer.decode(row["prompt_ids"]) == "<<a>>"
    moved = tmp_path / "moved.jinja"
    moved.write_text(template.read_text())
    assert cli(*asked, *words, "--chat-template", str(moved)).code == 0
    moved.write_text("{% for message in messages %}({{ message.content }}){% endfor %}")
    resumed = cli(*asked, *words, "--chat-template", str(moved))
    assert resumed.code == 2
    assert "chat_template" in " ".join(resumed.err.split())
    assert json.loads(out.read_text()) == row
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    prompts.write_text(json.dumps({"messages": talk}))
    config = tmp_path / "run.yaml"
    run = {"target": str(file), "data": [str(prompts)], "output": str(tmp_path / "run")}
    config.write_text(json.dumps(run | {"held_out": 0}))
    refused = cli("train", str(config), "--dry-run")
    assert refused.code == 2
    assert "template" in refused.error
    planned = cli("train", str(config), "--dry-run", f"chat_template={template}")
    assert planned.code == 0, planned.error
