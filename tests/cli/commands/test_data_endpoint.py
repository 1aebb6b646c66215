"""`moaspec data regenerate --endpoint`: a real server writes, and nothing is lost by a kill."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
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
from moaspec_train.cli.writing_progress import WritingProgress
from moaspec_train.dataset.journal import Journal

SMALL = ("--max-new-tokens", "8", "--batch", "2")


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few conversations are more than one group."""
    monkeypatch.setattr("moaspec_train.cli.writing_options.GROUP_SIZE", 4)


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
    again = cli(*arguments, "--out", str(there), "--endpoint", url, "--batch", "5")
    assert again.code == 0
    assert there.read_bytes() == here.read_bytes()


def test_key_comes_from_the_environment_and_drops_are_said(
    cli: Cli, model: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Fields] = []
    number = itertools.count(1)

    def answer(fields: Fields) -> tuple[int, Any]:
        asked.append(fields)
        return completion("w30", token_ids=[30 + (next(number) == 3), chat_tokenizers.END])

    monkeypatch.setenv("MOASPEC_API_KEY", "secret\n")
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


def test_budgets_shorter_than_an_answer_get_to_the_end(
    cli: Cli, model: str, url: str, prompts: str, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    arguments = ("data", "regenerate", prompts, "--model", model, "--out", str(out), *SMALL)
    endpoint = ("--endpoint", url, "--limit", "4", "--batch", "1", "--for", "0.001s")
    codes: list[int] = []
    while not codes or codes[-1]:
        codes.append(cli(*arguments, *endpoint).code)
        assert codes[-1] in (0, 75)
        assert len(codes) <= 5
    assert rows(out) == ["0", "1", "2", "3"]


def word(fields: Fields) -> int:
    """The first word of a prompt; it is 10 for the first conversation, and so on."""
    return int(fields["prompt"][3])


def good(fields: Fields) -> tuple[int, Any]:
    return completion(f"w{word(fields)}", token_ids=[word(fields), chat_tokenizers.END])


def rows(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


ALL = [str(i) for i in range(12)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_group_is_saved(
    number: int,
    cli: Cli,
    model: str,
    prompts: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Conversations of later groups, which are finished by then, are not mixed up with it."""
    out, real, calls, others = tmp_path / "out.jsonl", os.fsync, [0], threading.Semaphore(0)

    def second_group_last(fields: Fields) -> tuple[int, Any]:
        if fields["max_tokens"] > 4:
            if 13 <= word(fields) <= 15:
                others.acquire(timeout=60)
                others.release()
            elif word(fields) == 21:
                others.release()
        return good(fields)

    def fsync(file: int) -> None:
        real(file)
        calls[0] += 1
        if calls[0] == 4:  # the rows of the second group
            signal.raise_signal(number)

    name = ("data", "regenerate", prompts, "--model", model, "--out", str(out))
    options = ("--max-new-tokens", "8", "--batch", "12")
    monkeypatch.setattr("moaspec_train.cli.writing_options.GROUP_SIZE", 3)
    with fake(second_group_last) as url:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", fsync)
            done = cli(*name, *options, "--endpoint", url)
        assert done.code == 128 + number
        assert "6 rows are in" in done.err
        assert cli(*name, *options, "--endpoint", url).code == 0
    assert rows(out) == ALL


def test_sigterm_inside_the_event_loop(
    cli: Cli, model: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There an exception would be logged, and the run would go on."""
    out, real, told = tmp_path / "out.jsonl", WritingProgress.add, [0]

    def add(self: WritingProgress, *given: Any, **named: Any) -> None:
        told[0] += 1
        if told[0] == 5:
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGTERM)
        real(self, *given, **named)

    monkeypatch.setattr(WritingProgress, "add", add)
    arguments = ("data", "regenerate", prompts, "--model", model, "--out", str(out), *SMALL)
    with fake(good) as url:
        done = cli(*arguments, "--endpoint", url)
        assert (done.code, "Traceback" in done.err) == (143, False)
        assert cli(*arguments, "--endpoint", url).code == 0
    assert rows(out) == ALL


def test_sigterm_while_no_answer_comes(cli: Cli, model: str, prompts: str, tmp_path: Path) -> None:
    out, ended = tmp_path / "out.jsonl", threading.Event()

    def hanging(fields: Fields) -> tuple[int, Any]:
        if fields["max_tokens"] > 4:
            if word(fields) > 11:
                os.kill(os.getpid(), signal.SIGTERM)
            if word(fields) > 10:
                ended.wait(60)
        return good(fields)

    arguments = ("data", "regenerate", prompts, "--model", model, "--out", str(out), *SMALL)
    with fake(hanging) as url:
        done = cli(*arguments, "--endpoint", url)
        assert not ended.is_set()
        ended.set()
    assert done.code == 143
    assert "1 conversations of the next groups beside it" in done.err


def test_finished_conversations_are_kept_before_the_run_ends(
    cli: Cli, model: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long answer of the first group does not leave the others to a kill."""
    out, kept = tmp_path / "out.jsonl", list[int]()

    def first_last(fields: Fields) -> tuple[int, Any]:
        if fields["max_tokens"] > 4 and word(fields) == 10:
            deadline = time.monotonic() + 60
            while max(kept, default=0) < 11 and time.monotonic() < deadline:
                time.sleep(0.05)
        return good(fields)

    def keep(journal: Journal, finished: Any) -> None:
        real(journal, finished)
        kept.append(len(finished))

    real = Journal.keep
    monkeypatch.setattr(Journal, "keep", keep)
    monkeypatch.setattr("moaspec_train.cli.writing_progress.KEEP_EVERY_S", 0.1)
    arguments = ("data", "regenerate", prompts, "--model", model, "--out", str(out), *SMALL)
    with fake(first_last) as url:
        assert cli(*arguments, "--endpoint", url).code == 0
    assert max(kept) == 11
    assert rows(out) == ALL


def test_several_servers(cli: Cli, model: str, url: str, prompts: str, tmp_path: Path) -> None:
    """Named by several options or with commas; the rows are those of one server."""
    one, two, three = (tmp_path / f"{n}.jsonl" for n in range(3))
    name = ("data", "regenerate", prompts, "--model", model, "--max-new-tokens", "8")
    assert cli(*name, "--out", str(one), "--endpoint", url).code == 0
    assert cli(*name, "--out", str(two), "--endpoint", f"{url}, {url}/v1").code == 0
    done = cli(*name, "--out", str(three), "--endpoint", url, "--endpoint", f"{url}/v1")
    assert done.code == 0
    assert one.read_bytes() == two.read_bytes() == three.read_bytes()
    twice = cli(*name, "--out", str(tmp_path / "x.jsonl"), "--endpoint", f"{url},{url}")
    assert (twice.code, "twice" in twice.error) == (2, True)


def test_a_server_that_goes_away_costs_no_finished_conversation(
    cli: Cli, model: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, asked = tmp_path / "out.jsonl", []

    def unloaded(fields: Fields) -> tuple[int, Any]:
        if fields["max_tokens"] > 4:
            asked.append(fields["prompt"])
            if len(asked) == 8:
                return 404, {"error": "model unloaded"}
        return good(fields)

    arguments = ("data", "regenerate", prompts, "--model", model, "--out", str(out), *SMALL)
    with fake(unloaded) as url:
        endpoint = ("--endpoint", url, "--batch", "1")
        monkeypatch.setattr("moaspec_train.cli.writing_options.GROUP_SIZE", 12)
        done = cli(*arguments, *endpoint)
        assert done.code == 1
        assert "model unloaded" in done.err
        assert cli(*arguments, *endpoint).code == 0
    assert rows(out) == ALL
    assert len(asked) == 12 + 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--endpoint", "localhost:8000"), "is no URL of a server"),
        (("--endpoint", "http://localhost:1", "--drafter", "a"), "--drafter is for decoding here"),
        (("--endpoint", "http://localhost:1", "--adapter", "a"), "--adapter is for decoding here"),
        (("--endpoint", "http://localhost:1", "--dtype", "float32"), "--dtype is for decoding"),
        (("--endpoint", "http://localhost:1", "--device", "cuda"), "--device is for decoding"),
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
    options = ("--max-new-tokens", "30", "--batch", "2")
    program = Path(__file__).parents[2] / "kill_commands.py"
    command = ("data", "regenerate", prompts, "--out", str(out), "--model", model, *options)
    done = subprocess.run(
        [sys.executable, str(program), "10", str(out), *command, "--endpoint", url],
        capture_output=True,
        text=True,
        check=True,
    )
    values = json.loads(done.stdout.splitlines()[-1])
    assert len(set(values["sizes"])) >= 2
    assert values["different_outputs"] == 1
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in rows] == [str(i) for i in range(12)]
    for row in rows[:3]:
        alone = moaspec.generate(target, row["prompt_ids"], max_new_tokens=30)
        assert row["response_ids"] == alone.token_ids
