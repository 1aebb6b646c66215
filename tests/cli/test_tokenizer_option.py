"""--tokenizer: a directory in place of a GGUF file's tokenizer that is not known here."""

from __future__ import annotations

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
