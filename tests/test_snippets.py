"""Code of README.md, CONTRIBUTING.md and docs/.

Python runs, or the table below says why not. Shell commands are not run, because most need minutes,
a server or a model: their options, files and make targets must exist.
"""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from transformers import AutoModelForCausalLM

import chat_tokenizers
import moaspec
import tiny
from commands import load_targets_by, text_target
from moaspec.model.checkpoint.moa_checkpoint import save_drafter
from moaspec_core.cli.main import app
from moaspec_serve.openai.chat_schema import ChatRequest

ROOT = Path(__file__).parents[1]
INSTALL: dict[str, Any] = runpy.run_path(str(ROOT / "scripts/install.py"))
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *(
        f"docs/{page.name}"
        for page in sorted((ROOT / "docs").glob("*.md"))
        if page.name != "python-api.md"  # signatures, generated from code that runs
    ),
)
NOT_RUN = {
    "from moaspec_edge import Credentials": "its server is elsewhere",
    "service = TargetService": "options are left out",
    "from openai import OpenAI": "its server is elsewhere",
    "from langchain_openai import": "its server is elsewhere",
    "from litellm import": "its server is elsewhere",
    "import speculators\n": "speculators is not installed",
}


FOREIGN = ("from langchain_openai ", "from litellm ", "import speculators")
"""Packages of other projects that only a reader installs."""

PROGRAMS = {
    "apt-get": "installs",
    "curl": "asks a server",
    "docker": "builds and runs images",
    "eval": "runs a printed command",
    "for": "a loop",
    "done": "a loop",
    "git": "changes the repository",
    "llm": "asks a server",
    "make": "its targets are looked up",
    "moaspec": "its options are parsed",
    "pip": "its extras are looked up",
    "pre-commit": "changes the repository",
    "python": "its files are looked up",
    "scripts": "files are looked up",
    "source": "enters an environment",
    "sudo": "runs another program",
    "torchrun": "starts processes",
    "vllm": "asks a server",
    ".": "enters an environment",
}
"""Programs that shell snippets may start, and why these are not run."""


def snippets(language: str = "python") -> Iterator[tuple[str, str]]:
    """Page and code of each."""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
        yield from ((page, code) for name, code in blocks if name == language)


def shell_lines() -> list[str]:
    return [
        line
        for _, code in snippets("bash")
        for line in code.replace("\\\n", " ").splitlines()
        if line.strip() and not line.startswith("#")
    ]


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
        own = [one for one in imports if not ast.unparse(one).startswith(FOREIGN)]
        exec(compile(ast.Module(own, []), page, "exec"), {})


def test_every_snippet_has_a_language() -> None:
    for page in PAGES:
        if page != "docs/cli.md":
            fences = re.findall(r"^```(.*)$", (ROOT / page).read_text("utf-8"), flags=re.MULTILINE)
            assert set(fences[::2]) <= {"bash", "json", "python", "text", "yaml"}, page


def test_data_in_snippets_can_be_read() -> None:
    for _, code in snippets("json"):
        json.loads(code)
    for _, code in snippets("yaml"):
        yaml.safe_load(code)


def test_shell_snippets_start_known_programs() -> None:
    for line in shell_lines():
        line = re.sub(r"^[A-Z_]+=\$\(", "", line)  # NAME=$(command)
        words = [word for word in line.split() if not re.match(r"[A-Z_]+=", word)]
        assert re.split(r"(?<=.)/", words[0].removeprefix(".venv/bin/"))[0] in PROGRAMS, line


def test_shell_snippets_name_what_there_is() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in shell_lines():
        for file in re.findall(r"(?<![\w/.-])(?:benchmarks|scripts|tests|lab)/[\w./-]+", line):
            assert (ROOT / file).exists(), line
        for target in re.findall(r"^make ([a-z][\w-]*)", line):
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), line
        for named in re.findall(r"scripts/install\.py ((?:[a-z]+ ?)+)", line):
            assert set(named.split()) <= set(INSTALL["PARTS"]), line


def test_pages_install_what_exists() -> None:
    """Ours are on no index: a clone or a wheel is named. Others are names on an index."""
    readmes = [*ROOT.glob("packages/*/README.md"), *ROOT.glob("drafters/*/README.md")]
    for page in (*map(ROOT.joinpath, PAGES), *readmes):
        text = page.read_text(encoding="utf-8")
        for asked in re.findall(r"pip install ([^`#\n]*)", text):
            for word in shlex.split(asked):
                assert not re.match(r"moaspec[\w-]*(\[|$)", word), (page, asked)
                path = re.match(r"((?:\./)?(?:packages|drafters)/[\w-]+)(?:\[([\w,]+)\])?$", word)
                if path is not None:
                    project = tomllib.loads((ROOT / path[1] / "pyproject.toml").read_text("utf-8"))
                    extras = project["project"].get("optional-dependencies", {})
                    assert set((path[2] or "").split(",")) - {""} <= set(extras), (page, asked)


def commands() -> Iterator[list[str]]:
    """The arguments of every `moaspec` in the shell snippets."""
    for line in shell_lines():
        for text in re.findall(
            r"(?:^|[ (])moaspec (?=[a-z])((?:\"[^\"]*\"|'[^']*'|[^)#\n&|])*)", line
        ):
            yield shlex.split(text.rstrip('" ') if text.count('"') % 2 else text)


def test_examples_say_how_they_sample() -> None:
    """OpenAI's default temperature is 1, at which a small model writes nonsense."""
    calls = [
        code
        for _, code in snippets()
        if re.search(r"completions\.create\(|completion\(|ChatOpenAI\(|responses\.create\(", code)
    ]
    bodies = [line for line in shell_lines() if re.search(r"/v1/(chat/)?completions", line)]
    assert len(calls) >= 3
    assert bodies
    assert [one for one in (*calls, *bodies) if "temperature" not in one] == []


def test_bodies_that_curl_sends_are_requests() -> None:
    bodies = [
        words[words.index("-d") + 1]
        for words in (shlex.split(line) for line in shell_lines() if line.startswith("curl "))
        if words[1].endswith("/v1/chat/completions")
    ]
    assert bodies
    for body in bodies:
        ChatRequest.model_validate_json(body)


@pytest.mark.slow
def test_commands_in_shell_snippets_can_be_parsed() -> None:
    parsed = 0
    for words in commands():
        command: Any = typer.main.get_command(app)
        name, *arguments = words
        command = command.commands[name]
        if arguments and arguments[0] in getattr(command, "commands", {}):
            name, *arguments = arguments
            command = command.commands[name]
        context = type(typer.Context(command))(command)
        command.make_parser(context).parse_args(args=arguments)
        parsed += 1
    assert parsed >= 40
