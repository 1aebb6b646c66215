"""`moaspec data regenerate --endpoint`: a real server writes, and nothing is lost by a kill."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import chat_tokenizers
import moaspec
from commands import Cli
from endpoints import Fields, completion, fake, moaspec_server
from moaspec.target import registry
from moaspec.target.target import Target

SMALL = ("--max-new-tokens", "8", "--batch-size", "2", "--group-size", "4")


@pytest.fixture(scope="module")
def target() -> Target:
    return chat_tokenizers.target(seed=7)


@pytest.fixture(scope="module")
def model(target: Target, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("target")
    target.model.save_pretrained(directory)
    tokenizer: Any = target.tokenizer
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def url(target: Target) -> Iterator[str]:
    with moaspec_server(target) as found:
        yield found


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    rows = [{"prompt": f"w{10 + i % 50} w{11 + i % 7}"} for i in range(12)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_no_weights_are_loaded(
    cli: Cli,
    model: str,
    url: str,
    prompts: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rows are those that are written with weights."""
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    arguments = ("data", "regenerate", prompts, "--model", model, *SMALL)
    assert cli(*arguments, "--out", str(here)).code == 0
    monkeypatch.delattr(registry, "_load_model")
    done = cli(*arguments, "--out", str(there), "--endpoint", url)
    assert (done.code, done.words) == (0, f"12 rows in {there}")
    assert "12/12" in done.err
    assert "tokens/s" in done.err
    assert there.read_bytes() == here.read_bytes()
    again = cli(*arguments, "--out", str(there), "--endpoint", url, "--batch-size", "5")
    assert again.code == 0
    assert there.read_bytes() == here.read_bytes()


def test_key_comes_from_the_environment_and_drops_are_said(
    cli: Cli, model: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Fields] = []

    def answer(fields: Fields) -> tuple[int, Any]:
        asked.append(fields)
        return completion("w30", token_ids=[30 + (len(asked) == 3), chat_tokenizers.END])

    monkeypatch.setenv("MOASPEC_API_KEY", "secret")
    out = tmp_path / "out.jsonl"
    with fake(answer) as url:
        done = cli(
            *("data", "regenerate", prompts, "--model", model, "--out", str(out), *SMALL),
            *("--endpoint", url, "--temperature", "0.5", "--top-p", "0.9"),
        )
    assert (done.code, done.words) == (0, f"11 rows in {out}")
    assert "1 answers of this run dropped: its token ids stand for another text" in done.err
    assert {fields["key"] for fields in asked} == {"Bearer secret"}
    assert (asked[-1]["temperature"], asked[-1]["top_p"]) == (0.5, 0.9)
    assert len({fields.get("seed") for fields in asked[1:]}) == 12


def test_time_limit(cli: Cli, model: str, url: str, prompts: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    arguments = ("data", "regenerate", prompts, "--model", model, "--out", str(out), *SMALL)
    done = cli(*arguments, "--endpoint", url, "--for", "0.001s")
    assert done.code == 75
    assert "run the same command again" in done.err
    assert cli(*arguments, "--endpoint", url).code == 0
    assert len(out.read_text().splitlines()) == 12


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--endpoint", "localhost:8000"), "is no URL of a server"),
        (("--endpoint", "http://localhost:1", "--drafter", "a"), "--drafter is for decoding here"),
        (("--endpoint", "http://localhost:1", "--adapter", "a"), "--adapter is for decoding here"),
        (("--endpoint-model", "a"), "--endpoint-model needs --endpoint"),
    ],
)
def test_wrong_options(
    options: tuple[str, ...], said: str, cli: Cli, model: str, prompts: str, tmp_path: Path
) -> None:
    out = str(tmp_path / "out.jsonl")
    done = cli("data", "regenerate", prompts, "--model", model, "--out", out, *options)
    assert done.code == 2
    assert said in done.error


@pytest.mark.slow
def test_kill_9_at_ten_random_moments(
    model: str, url: str, prompts: str, target: Target, tmp_path: Path
) -> None:
    """A run that is killed and resumed writes the bytes of an uninterrupted run."""
    out = tmp_path / "r.jsonl"
    options = ("--max-new-tokens", "30", "--batch-size", "2", "--group-size", "3")
    program = Path(__file__).parents[1] / "kill_commands.py"
    command = ("data", "regenerate", prompts, "--out", str(out), "--model", model, *options)
    done = subprocess.run(
        [sys.executable, str(program), "10", str(out), *command, "--endpoint", url],
        capture_output=True,
        text=True,
        check=True,
    )
    facts = json.loads(done.stdout.splitlines()[-1])
    assert len(set(facts["sizes"])) >= 2
    assert facts["different_outputs"] == 1
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in rows] == [str(i) for i in range(12)]
    for row in rows[:3]:
        alone = moaspec.generate(target, row["prompt_ids"], max_new_tokens=30)
        assert row["response_ids"] == alone.token_ids
