"""`moaspec data`: from nothing to a drafter, and what happens when something is wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import chat_tokenizers
from commands import complaints, interrupt_after
from moaspec_core.cli.main import run
from moaspec_core.engine.engine import Engine
from moaspec_train.cli.writing_progress import WritingProgress
from moaspec_train.dataset.journal import Journal
from moaspec_train.dataset.response_writer import ResponseWriter

COMMANDS = ("synth", "regenerate", "stats", "overlap")
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs `moaspec`; returns exit code, output and complaints, line breaks forgotten."""
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["moaspec", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            run()
        captured = capsys.readouterr()
        code = caught.value.code
        out, err = (" ".join(text.split()) for text in (captured.out, complaints(captured.err)))
        return (code if isinstance(code, int) else 0), out, err

    return call


def saved(directory: Path, template: str | None = chat_tokenizers.CHATML, **changes: Any) -> str:
    target = chat_tokenizers.target(template, **changes)
    target.model.save_pretrained(directory)
    tokenizer: Any = target.tokenizer
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("target"))


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


PROMPTS = [{"prompt": f"w{i} w{i + 1}"} for i in range(20, 30)]
SMALL = ("--max-new-tokens", "8", "--batch", "2")


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few conversations are more than one group."""
    monkeypatch.setattr("moaspec_train.cli.writing_options.GROUP_SIZE", 4)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str, cli: Cli) -> None:
    code, out, _ = cli("data", command, "--help")
    assert code == 0
    assert f"moaspec data {command}" in out


@pytest.mark.slow
def test_from_nothing_to_a_drafter(cli: Cli, model: str, tmp_path: Path) -> None:
    """synth, regenerate, stats, train, generate: no data set anywhere."""
    prompts, responses = str(tmp_path / "p.jsonl"), str(tmp_path / "r.jsonl.gz")
    name = ("--model", model)
    code, out, _ = cli("data", "synth", "--num", "6", "--out", prompts, *name, "--batch", "4")
    assert (code, out) == (0, f"6 rows in {prompts}")
    code, out, err = cli("data", "regenerate", prompts, "--out", responses, *name, *SMALL)
    assert (code, out) == (0, f"6 rows in {responses}")
    assert "6/6" in err
    assert "tokens/s" in err
    code, out, _ = cli("data", "stats", responses, *name, "--json")
    assert json.loads(out)["examples"] <= 6
    config = tmp_path / "config.yaml"
    config.write_text(
        f"target: {model}\ndata: [{responses}]\noutput: {tmp_path / 'run'}\n"
        "held_out: 1\nbatch_tokens: 60\nsteps: 3\nwarmup_steps: 1\nsave_every: 2\n"
    )
    assert cli("train", str(config))[0] == 0
    drafter = ("--drafter", str(tmp_path / "run" / "drafter"))
    code, out, _ = cli("generate", "w20", *name, *drafter, "--json", "--max-new-tokens", "8")
    assert code == 0
    again = str(tmp_path / "again.jsonl")
    assert cli("data", "regenerate", prompts, "--out", again, *name, *SMALL, *drafter)[0] == 0
    more, states = str(tmp_path / "more.jsonl"), str(tmp_path / "states")
    # In bf16 the states of this random model differ by more than those of two targets may.
    keeping = ("--keep", states, "--keep-for", drafter[1], "--dtype", "float32")
    assert cli("data", "regenerate", prompts, "--out", more, *name, *SMALL, *keeping)[0] == 0
    sizes = [path.stat().st_size for path in Path(states).rglob("*.data")]
    further = (f"initial={drafter[1]}", "frozen_lsa=1", f"kept={states}", f"output={states}-run")
    held_out = (f"data={more}", f"held_out_data={more}")
    code, _, err = cli("train", str(config), *further, *held_out)
    assert (code, "All examples of data are also in held_out_data" in err) == (2, True)
    assert cli("train", str(config), *further, f"data={more}")[0] == 0
    assert [path.stat().st_size for path in Path(states).rglob("*.data")] == sizes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--keep", "states"), "--keep and --keep-for go together"),
        (("--keep-for", "run"), "--keep and --keep-for go together"),
        (("--keep", "states", "--keep-for", "run", "--drafter", "run"), "leave --drafter out"),
        (("--keep", "s", "--keep-for", "r", "--endpoint", "http://a"), "leave --endpoint out"),
        (("--keep", "states", "--keep-for", "run", "--max-length", "0"), "at least 1, got 0"),
        (("--keep", "p.jsonl", "--keep-for", "run"), "p.jsonl"),
        (("--keep", "states", "--keep-for", "nowhere"), "nowhere"),
    ],
)
def test_what_cannot_be_kept(
    options: tuple[str, ...],
    message: str,
    cli: Cli,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is written then."""
    monkeypatch.chdir(tmp_path)
    prompts = jsonl(tmp_path / "p.jsonl", PROMPTS[:1])
    code, _, err = cli(
        "data", "regenerate", prompts, "--out", "r.jsonl", "--model", model, *options
    )
    assert (code, message in err) == (2, True), err
    assert not any((tmp_path / name).exists() for name in ("states", "s", "r.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("command", ["regenerate", "synth"])
def test_stopping_in_time_and_going_on(command: str, cli: Cli, model: str, tmp_path: Path) -> None:
    """At least one conversation is finished; in the end the rows are those of one run."""
    prompts = [jsonl(tmp_path / "p.jsonl", PROMPTS[:3])] if command == "regenerate" else []
    limits = () if command == "regenerate" else ("--num", "3")
    rows = []
    for name in ("whole", "cut"):
        out = tmp_path / f"{name}.jsonl"
        arguments = (
            "data",
            command,
            *prompts,
            *limits,
            "--out",
            str(out),
            "--model",
            model,
            *SMALL,
        )
        if name == "cut":
            code, _, err = cli(*arguments, "--for", "0.001s")
            assert code == 75
            assert "run the same command again" in err
            assert "1 conversations of the next group" in err
        assert cli(*arguments, "--for", "1h")[0] == 0
        rows.append(out.read_bytes())
    assert rows[0] == rows[1]
    assert cli(*arguments, "--for", "soon")[0] == 2


def test_budgets_shorter_than_a_group_get_to_the_end(cli: Cli, model: str, tmp_path: Path) -> None:
    prompts = jsonl(tmp_path / "p.jsonl", PROMPTS[:4])
    rows = []
    for name, more in (("whole", ()), ("cut", ("--for", "0.001s"))):
        out = tmp_path / f"{name}.jsonl"
        arguments = ("data", "regenerate", prompts, "--out", str(out), "--model", model, *SMALL)
        codes: list[int] = []
        while not codes or codes[-1]:
            codes.append(cli(*arguments, *more)[0])
            assert codes[-1] in (0, 75)
            assert len(codes) <= 5
        rows.append(out.read_bytes())
    assert rows[0] == rows[1]


@pytest.mark.parametrize("command", ["regenerate", "synth"])
def test_sigterm_says_what_is_saved(
    command: str, cli: Cli, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [jsonl(tmp_path / "p.jsonl", PROMPTS)] if command == "regenerate" else []
    step, calls = Engine.step, []

    def terminated(self: Engine) -> Any:
        calls.append(1)
        if len(calls) == 25:
            signal.raise_signal(signal.SIGTERM)
        return step(self)

    monkeypatch.setattr(Engine, "step", terminated)
    out = ("--out", str(tmp_path / "r.jsonl"))
    code, _, err = cli("data", command, *prompts, *out, "--model", model, *SMALL)
    assert code == 143
    assert "rows are in" in err
    assert "run the same command again" in err


def test_synth_gives_up_and_shows_what_it_discards(
    cli: Cli, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moaspec_train.cli.data.SAMPLES_PER_PROMPT", 1)
    out = ("--out", str(tmp_path / "p.jsonl"), "--model", model, *SMALL)
    code, _, err = cli("data", "synth", "--num", "8", *out)
    assert code == 1
    assert "of 8 samples discarded" in err
    assert "of 8 prompts" in err
    assert "raise the temperature" in err
    assert cli("data", "synth", *out, "--num", "0")[0] == 2


def test_synth_counts_prompts_before_their_group_ends(
    cli: Cli, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[float] = []
    add = WritingProgress.add

    def watched(self: WritingProgress, tokens: int, finished: int, **more: Any) -> None:
        add(self, tokens, finished, **more)
        shown.append(self.task.completed)

    monkeypatch.setattr(WritingProgress, "add", watched)
    monkeypatch.setattr("moaspec_train.cli.data.SAMPLES_PER_PROMPT", 1)
    monkeypatch.setattr("moaspec_train.cli.writing_options.GROUP_SIZE", 64)
    out = ("--out", str(tmp_path / "p.jsonl"), "--model", model, "--max-new-tokens", "16")
    assert cli("data", "synth", "--num", "64", *out)[0] == 1
    assert 0 < max(shown) < 64
    assert shown == sorted(shown)


def test_running_again_adds_nothing(cli: Cli, model: str, tmp_path: Path) -> None:
    prompts, out = jsonl(tmp_path / "p.jsonl", PROMPTS[:3]), tmp_path / "r.jsonl"
    arguments = ("data", "regenerate", prompts, "--out", str(out), "--model", model, *SMALL)
    assert cli(*arguments)[0] == 0
    before = out.read_bytes()
    assert cli(*arguments)[0] == 0
    assert out.read_bytes() == before
    code, _, err = cli(*arguments, "--temperature", "0.5")
    assert code == 2
    assert "temperature=0.0, now it is 0.5" in err


def test_ctrl_c_says_how_to_go_on(
    cli: Cli, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, out = jsonl(tmp_path / "p.jsonl", PROMPTS), tmp_path / "r.jsonl"
    step, calls = Engine.step, []

    def interrupted(self: Engine) -> Any:
        calls.append(1)
        if len(calls) == 25:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    arguments = ("data", "regenerate", prompts, "--out", str(out), "--model", model, *SMALL)
    code, _, err = cli(*arguments)
    assert code == 130
    assert "Stopped. 4 rows" in err
    assert "Traceback" not in err
    assert cli(*arguments)[0] == 0
    assert len(out.read_text().splitlines()) == len(PROMPTS)


def test_malformed_rows(cli: Cli, model: str, tmp_path: Path) -> None:
    rows = [PROMPTS[0], "{", {"text": "x"}, {"prompt": "w20 " * 300}, PROMPTS[1]]
    prompts, out = jsonl(tmp_path / "p.jsonl", rows), tmp_path / "r.jsonl"
    arguments = ("data", "regenerate", prompts, "--out", str(out), "--model", model, *SMALL)
    code, _, err = cli(*arguments)
    assert code == 2
    assert "p.jsonl:2" in err
    assert not out.exists()
    code, output, err = cli(*arguments, "--skip-malformed")
    assert code == 0
    assert output.startswith("2 rows")
    assert "3 malformed rows skipped" in err
    empty = jsonl(tmp_path / "empty.jsonl", ["{"])
    code, _, err = cli("data", "stats", empty, "--model", model, "--skip-malformed")
    assert code == 2
    assert "No usable training examples" in err


def test_without_a_chat_template(cli: Cli, tmp_path: Path) -> None:
    """Plain prompts work; messages and generator cannot, and the message says why."""
    name = ("--model", saved(tmp_path / "model", None))
    prompts = jsonl(tmp_path / "p.jsonl", PROMPTS[:3])
    out = tmp_path / "r.jsonl"
    assert cli("data", "regenerate", prompts, "--out", str(out), *name, *SMALL)[0] == 0
    assert json.loads(out.read_text().splitlines()[0])["prompt_ids"] == [20, 21]
    talk = jsonl(tmp_path / "m.jsonl", [{"messages": [{"role": "user", "content": "w20"}]}])
    other = ("--out", str(tmp_path / "x.jsonl"))
    for arguments in (("regenerate", talk), ("synth",)):
        code, _, err = cli("data", *arguments, *other, *name)
        assert code == 2
        assert "no chat template" in err


def test_what_options_and_files_decide_is_refused_without_weights(
    cli: Cli, model: str, tmp_path: Path
) -> None:
    """Loading a large target takes minutes."""
    bare = str(shutil.copytree(model, tmp_path / "bare"))
    (tmp_path / "bare" / "model.safetensors").unlink()
    prompts, out = jsonl(tmp_path / "p.jsonl", PROMPTS), tmp_path / "r.jsonl"
    out.write_text("mine")
    Journal(tmp_path / "begun", {"target": bare, "seed": 0}).close()
    long = jsonl(tmp_path / "long.jsonl", [{"prompt": "w20 " * 300}])
    for refused, named in (
        (("--out", str(out)), "not written by this command"),
        (("--out", str(tmp_path / "begun"), "--seed", "1"), "seed=0, now it is 1"),
        (("--out", str(tmp_path / "x"), "--drafter", "no/where"), "No drafter 'no/where'"),
        ((long, "--out", str(tmp_path / "x")), "long.jsonl:1"),
        ((str(tmp_path), "--out", str(tmp_path / "x")), "x is inside"),
    ):
        code, _, err = cli("data", "regenerate", prompts, "--model", bare, *refused)
        assert (code, named in err) == (2, True), err


def test_a_full_disk(cli: Cli, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, out = jsonl(tmp_path / "p.jsonl", PROMPTS), tmp_path / "r.jsonl"
    arguments = ("data", "regenerate", prompts, "--out", str(out), "--model", model, *SMALL)
    real, calls = os.fsync, []

    def full(file: int) -> None:
        calls.append(file)
        if len(calls) == 4:
            raise OSError(28, "No space left on device")
        real(file)

    monkeypatch.setattr(os, "fsync", full)
    code, _, err = cli(*arguments)
    assert code == 1
    assert "No space left" in err
    assert "4 rows before are intact" in err
    assert len(out.read_text().splitlines()) == 4
    assert cli(*arguments)[0] == 0
    assert len(out.read_text().splitlines()) == len(PROMPTS)


def test_a_gpu_that_disappears(
    cli: Cli, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second group: the first is kept, and the end has the bytes of a run without fault."""
    prompts, out = jsonl(tmp_path / "p.jsonl", PROMPTS), tmp_path / "r.jsonl"
    whole = tmp_path / "whole.jsonl"
    command = ("data", "regenerate", prompts, "--model", model, *SMALL, "--out")
    assert cli(*command, str(whole))[0] == 0
    real, groups = ResponseWriter.write, []

    def lose(self: ResponseWriter, authors: Any) -> Any:
        groups.append(authors)
        if len(groups) == 2:
            raise torch.AcceleratorError("CUDA error: device is lost")
        return real(self, authors)

    with monkeypatch.context() as patched:
        patched.setattr(ResponseWriter, "write", lose)
        code, _, err = cli(*command, str(out))
    assert code == 1
    assert "device is lost" in err
    assert "4 rows before are intact" in err
    assert cli(*command, str(out))[0] == 0
    assert out.read_bytes() == whole.read_bytes()


def test_system_prompts(cli: Cli, model: str, tmp_path: Path) -> None:
    systems = tmp_path / "s.txt"
    systems.write_text("w12\n\nw13\n")
    prompts, out = jsonl(tmp_path / "p.jsonl", PROMPTS), tmp_path / "r.jsonl"
    name = ("--model", model, "--system-prompts", str(systems), *SMALL)
    assert cli("data", "regenerate", prompts, "--out", str(out), *name)[0] == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["messages"][0]["content"] for row in rows} >= {"w12", "w13"}
    assert {row["messages"][0]["role"] for row in rows} == {"system", "user"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("regenerate", "nowhere.jsonl", "--out", "x"), "nowhere.jsonl"),
        (("regenerate", "nowhere.jsonl", "--out", "x", "--limit", "9" * 30), "nowhere.jsonl"),
        (("regenerate", "p", "--out", "x", "--limit", "0"), "--limit"),
        (("stats", "p", "--max-length", "-1"), "--max-length"),
        (("regenerate", "p", "--out", "x", "--batch", "0"), "batch_size"),
        (("regenerate", "p", "--out", "x", "--temperature", "-1"), "temperature"),
        (("regenerate", "p", "--out", "x", "--system-prompts", "nowhere.txt"), "nowhere.txt"),
        (("synth", "--out", "x", "--num", "0"), "--num"),
    ],
    ids=str,
)
def test_bad_input(arguments: tuple[str, ...], message: str, cli: Cli) -> None:
    code, _, err = cli("data", *arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_stats_as_a_table(cli: Cli, model: str, tmp_path: Path) -> None:
    data = jsonl(tmp_path / "d.jsonl", [{"prompt_ids": [20], "response_ids": [21, 22]}] * 3)
    code, out, _ = cli("data", "stats", data, "--model", model)
    assert code == 0
    assert "3 examples with 3 responses: 9 tokens" in out
    assert "bytes a token" in out
    assert "32768" in out


@pytest.mark.parametrize("command", [["stats"], ["overlap", "--against", "/nope"]], ids=str)
def test_an_absent_file_is_told_before_a_target_is_read(
    cli: Cli, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moaspec_train.cli.data_studies.read_spec", None)
    code, _, err = cli("data", *command, "/nope", "--model", "any")
    assert code == 2
    assert "Cannot read the data /nope" in err


def test_stats_of_the_rows_before_ctrl_c(
    cli: Cli, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = jsonl(tmp_path / "d.jsonl", [{"prompt_ids": [20], "response_ids": [21, 22]}] * 3)
    interrupt_after(2, "moaspec_train.dataset.read_examples._check_ids", monkeypatch)
    code, out, err = cli("data", "stats", data, "--model", model, "--json")
    assert code == 130
    values = json.loads(out)
    assert values["examples"] == 3  # the one that was being read is finished
    assert not values["complete"]
    assert "Stopped" in err


def test_overlaps_before_ctrl_c(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    against = jsonl(tmp_path / "eval.jsonl", [{"prompt": "a b c"}])
    data = jsonl(tmp_path / "data.jsonl", [{"prompt": "a b c"}] * 3)
    interrupt_after(1, "moaspec.data.overlap._texts", monkeypatch)
    monkeypatch.setattr("moaspec_train.cli.data_studies.SHARED_WORDS", 3)
    options = ("--against", against, "--out", str(tmp_path / "out.jsonl"))
    code, out, err = cli("data", "overlap", data, *options)
    assert code == 130
    assert "1 rows share 3 words" in out
    assert "Nothing is written" in err
    assert not (tmp_path / "out.jsonl").exists()


def test_overlap(cli: Cli, tmp_path: Path) -> None:
    evaluation = tmp_path / "eval"
    evaluation.mkdir()
    jsonl(evaluation / "a.jsonl", [{"turns": ["a b c d e f g h i"]}])
    clean = jsonl(tmp_path / "clean.jsonl", [{"prompt": "a b c d e f g"}])
    dirty = jsonl(tmp_path / "dirty.jsonl", [{"prompt": "x A b c d e f g, h"}])
    against = ("--against", str(evaluation))
    assert cli("data", "overlap", clean, *against)[:2] == (
        0,
        "0 rows share 8 words in a row with a prompt.",
    )
    code, out, _ = cli("data", "overlap", clean, dirty, *against)
    assert code == 1
    assert "a b c d e f g h" in out
    code, out, _ = cli("data", "overlap", dirty, *against, "--json")
    assert json.loads(out)["overlaps"][0]["where"] == f"{dirty}:1"
    kept = tmp_path / "kept.jsonl"
    assert cli("data", "overlap", dirty, clean, *against, "--out", str(kept))[0] == 0
    assert kept.read_text() == Path(clean).read_text()
    code, _, err = cli("data", "overlap", dirty, *against, "--out", str(kept))
    assert code == 2
    assert "exists" in err
    ids = jsonl(tmp_path / "ids.jsonl", [{"prompt_ids": [1], "response_ids": [2]}])
    code, _, err = cli("data", "overlap", ids, *against)
    assert code == 2
    assert "--model" in err
    (tmp_path / "empty").mkdir()
    code, _, err = cli("data", "overlap", clean, "--against", str(tmp_path / "empty"))
    assert code == 2
    assert "holds no data" in err


@pytest.mark.slow
def test_kill_9_at_ten_random_moments(model: str, tmp_path: Path) -> None:
    """A run that is killed and resumed writes the bytes of an uninterrupted run."""
    rows = [{"prompt": f"w{10 + i % 50} w{11 + i % 7}"} for i in range(12)]
    prompts, out = jsonl(tmp_path / "p.jsonl", rows), tmp_path / "r.jsonl"
    options = ("--max-new-tokens", "30", "--batch", "2")
    program = Path(__file__).parents[2] / "kill_commands.py"
    command = ("data", "regenerate", prompts, "--out", str(out), "--model", model, *options)
    done = subprocess.run(
        [sys.executable, str(program), "10", str(out), *command],
        capture_output=True,
        text=True,
        check=True,
    )
    values = json.loads(done.stdout.splitlines()[-1])
    assert len(values["sizes"]) >= 10
    assert len(set(values["sizes"])) >= 2
    assert values["different_outputs"] == 1
    ids = [json.loads(line)["id"] for line in out.read_text().splitlines()]
    assert ids == [str(i) for i in range(len(rows))]
