"""Python in README.md and docs/: it runs, or the table below says why not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import chat_tokenizers
import moaspec
import tiny
from commands import load_targets_by, text_target
from moaspec.model.checkpoint.moa_checkpoint import save_drafter

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))))
NOT_RUN = {
    "from moaspec.remote import Credentials, GrpcTransport": "its server is elsewhere",
    "class Transport(Protocol)": "an interface written out",
    "class Device(Protocol)": "an interface written out",
    "service = TargetService": "options are left out",
    "from openai import OpenAI": "its server is elsewhere",
}


def snippets() -> Iterator[tuple[str, str]]:
    """Page and code of each."""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for code in re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
            yield page, code


def _runs(code: str) -> bool:
    return not code.startswith(tuple(NOT_RUN))


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the snippets take as given; those of a page go on from the README's."""
    target = text_target()
    tokenizer: Any = target.tokenizer
    tokenizer.chat_template, tokenizer.padding_side = chat_tokenizers.CHATML, "left"
    tokenizer.pad_token = "w0"
    tiny.model().save_pretrained(tmp_path / "model")
    save_drafter(tiny.agreeing_drafter("llama"), tmp_path / "drafter")
    load_targets_by(monkeypatch, lambda *_, **__: target)
    monkeypatch.setattr(moaspec, "load_target", lambda *_, **__: target, raising=False)
    monkeypatch.setattr(
        moaspec, "load_drafter", lambda *_, **__: tiny.agreeing_drafter("llama"), raising=False
    )
    return {
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "name": str(tmp_path / "model"),
        "path": tmp_path / "drafter",
        "tokenizer": tokenizer,
        "conversations": [[{"role": "user", "content": text}] for text in ("w5", "w9 w2")],
    }


@pytest.mark.slow
def test_snippets_run(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    ran = 0
    for page, code in snippets():
        if _runs(code):
            exec(compile(code, page, "exec"), names)
            ran += 1
    assert ran >= 5
    assert capsys.readouterr().out


def test_those_that_do_not_run_can_be_read_and_import_what_there_is() -> None:
    left_out = [(page, code) for page, code in snippets() if not _runs(code)]
    assert len(left_out) == len(NOT_RUN)
    for page, code in left_out:
        tree = compile(
            code,
            page,
            "exec",
            ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST,
            dont_inherit=True,
        )
        imports: list[ast.stmt] = [
            one for one in tree.body if isinstance(one, ast.Import | ast.ImportFrom)
        ]
        exec(compile(ast.Module(imports, []), page, "exec"), {})
