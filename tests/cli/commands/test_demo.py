"""`moaspec demo`: its JSON, its panes, and what it prints where nothing can be redrawn."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import threading
from typing import Any

import pytest
import torch
from rich.console import Console

import tiny
from commands import Cli, load_targets_by, text_target
from moaspec.cli import demo
from moaspec.evaluate import race
from moaspec.evaluate.correctness.equality import Equality
from moaspec.evaluate.race import DecodingStats, Race, TimedDecoding
from moaspec.target.target import Target
from moaspec_core.cli.options import MODEL
from moaspec_core.engine.engine import Engine

pytestmark = pytest.mark.essential

ESCAPE = "\x1b"
SAME = Equality("identical")


def a_race(speculative_s: float, *, passes: int = 30, equality: Equality = SAME) -> Race:
    return Race(
        plain=DecodingStats(tokens=60, seconds=2.0, passes=60),
        speculative=DecodingStats(tokens=60, seconds=speculative_s, passes=passes),
        equality=equality,
    )


# The command


@pytest.mark.usefixtures("loaded")
def test_demo_in_a_pipe(cli: Cli) -> None:
    output = cli("demo", "--max-new-tokens", "6", "--threads", "1")
    assert output.code == 0
    assert ESCAPE not in output.out + output.err
    for number in (1, 2, 3):
        assert f"Prompt {number}: " in output.out
        assert f"\n{number}. " in output.out
    for words in ("plain, done", "speculative, done", "6 tokens, 6 target passes", "same text"):
        assert words in output.out
    assert "Verdict: " in output.words
    assert output.out.index("Verdict: ") < output.out.index("Try next: ")
    assert "hf" not in output.out
    steps = output.err.splitlines()
    assert steps[-1] == "Warming up"
    assert any("passes and drafts cost here (once, about " in step for step in steps)


@pytest.mark.usefixtures("loaded")
def test_demo_as_json(cli: Cli) -> None:
    output = cli("demo", "--max-new-tokens", "5", "--json")
    assert output.code == 0
    data = json.loads(output.out)
    assert data["equality"]["kind"] == "identical"
    assert data["drafts"] == "drafter"
    assert data["plain"]["tokens"] == data["speculative"]["tokens"] == 5 * len(data["prompts"])
    ratio = data["plain"]["seconds"] / data["speculative"]["seconds"]
    assert data["speedup"] == pytest.approx(ratio)
    assert {"threads", "machine", "versions", "target", "dtype"} <= data.keys()


@pytest.mark.slow
@pytest.mark.usefixtures("loaded")
def test_a_model_without_a_drafter_shows_copies(cli: Cli) -> None:
    """Its prompts are about code, and what repeats the prompt is copied."""
    asked = ("demo", "--model", "qwen2.5-coder-1.5b", "--max-new-tokens", "30")
    output = cli(*asked)
    assert output.code == 0
    assert "No drafter is bundled for qwen2.5-coder-1.5b: drafts are continuations" in output.out
    assert re.search(r"Prompt 1: Write a Python function", output.out)
    assert "Try next: moaspec chat --model qwen2.5-coder-1.5b (talk" in output.words
    data = json.loads(cli(*asked, "--json").out)
    assert data["drafts"] == "copies"
    assert data["speculative"]["copied"] > 0
    assert (data["speculative"]["accepted"], data["plain"]["copied"]) == (0, 0)


@pytest.mark.usefixtures("loaded")
def test_a_different_text_fails(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Equality("different", 2, reason="token 5 is not the target's choice")
    monkeypatch.setattr(race, "compare_texts", lambda *_, **__: wrong)
    output = cli("demo", "--max-new-tokens", "5")
    assert output.code == 1
    assert "DIFFERENT" in output.out
    assert "FAULT" in output.words
    assert "as fast" not in output.words


@pytest.mark.parametrize(
    ("fastest", "options", "taken"),
    [
        (torch.bfloat16, (), "bfloat16"),
        (torch.float32, (), "float32"),
        (torch.float32, ("--dtype", "bfloat16"), "bfloat16"),
    ],
)
def test_the_demo_takes_the_dtype_that_the_cpu_has_instructions_for(
    fastest: torch.dtype,
    options: tuple[str, ...],
    taken: str,
    cli: Cli,
    loaded: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dtypes: list[str] = []

    def load(*_: Any, dtype: str, **__: Any) -> Target:
        dtypes.append(dtype)
        return loaded

    monkeypatch.setattr("moaspec.backends.load.fastest_dtype", lambda *_, **__: fastest)
    load_targets_by(monkeypatch, load)
    assert cli("demo", "--max-new-tokens", "2", *options).code == 0
    assert set(dtypes) == {taken}


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("option", ["--max-new-tokens", "--threads"])
@pytest.mark.parametrize("number", ["0", "-1"])
def test_bad_numbers_are_refused_at_once(option: str, number: str, cli: Cli) -> None:
    output = cli("demo", option, number)
    assert (output.code, output.out) == (2, "")
    assert output.err.startswith("Error: ")


def test_a_dtype_that_does_not_exist(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "moaspec.backends.cpu.build.why_not", lambda: pytest.fail("nothing is compiled first")
    )
    output = cli("demo", "--dtype", "float8")
    assert output.code == 2
    assert "'float8' is not one of 'auto', 'float32'" in output.err


# Ctrl-C


def interrupt_at(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Press Ctrl-C in that step of any engine."""
    calls: list[Engine] = []
    step = Engine.step

    def interrupted(self: Engine) -> Any:
        calls.append(self)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)


@pytest.mark.usefixtures("loaded")
def test_ctrl_c_while_texts_are_decoded(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(monkeypatch, 2 * demo.WARM_UP_TOKENS + 20)
    output = cli("demo", "--max-new-tokens", "50")
    assert output.code == 130
    assert "Prompt 1: " in output.out
    assert "speculative" in output.out
    assert "Prompt 2: " not in output.out
    assert "Verdict" not in output.words


@pytest.mark.usefixtures("loaded")
def test_ctrl_c_while_the_machine_is_measured(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("moaspec.calibration.first_use.measure_once", interrupted)
    output = cli("demo")
    assert output.code == 130
    assert "Traceback" not in output.err
    assert output.err.endswith(" s by its first passes)\nStopped by Ctrl-C.\n")


@pytest.mark.usefixtures("loaded")
def test_ctrl_c_as_json_gives_what_is_whole(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(monkeypatch, 2 * demo.WARM_UP_TOKENS + 20)
    output = cli("demo", "--max-new-tokens", "50", "--json")
    assert output.code == 130
    assert json.loads(output.out)["prompts"] == []


# What is said


def shown(race: Race, number: int, model: str = MODEL, *, drafted: bool = True) -> list[str]:
    screen = Console(file=io.StringIO(), width=200, highlight=False)
    demo.show_verdict(race, number, screen, model, drafted=drafted)
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("race", "number", "first", "second"),
    [
        (
            a_race(1.25),
            2,
            "Verdict: 1.60x as fast, same text, 50% fewer passes (2 prompts, 60 tokens).",
            None,
        ),
        (
            a_race(1.0, equality=Equality("near_tie", 3, 0.01, 0.1)),
            1,
            "Verdict: 2.00x as fast, same text up to ties in rounding, 50% fewer passes "
            "(1 prompt, 60 tokens).",
            None,
        ),
        (
            a_race(2.0),
            1,
            "Verdict: no gain (1.00x), same text (1 prompt, 60 tokens).",
            "A speculative pass gave 2.00 tokens, but took longer by as much or more.",
        ),
        (  # with as many passes the seconds differ by what else the machine did
            a_race(1.0, passes=60),
            1,
            "Verdict: no gain (2.00x), same text (1 prompt, 60 tokens).",
            "No draft was accepted: few or none are made where they do not surely pay.",
        ),
        (
            a_race(1.0, equality=Equality("different")),
            1,
            "Verdict: FAULT, a text is not the model's own (1 prompt, 60 tokens).",
            "`moaspec check` finds the first wrong token; please report it.",
        ),
    ],
)
def test_verdicts(race: Race, number: int, first: str, second: str | None) -> None:
    said = shown(race, number)
    assert said[0] == first
    assert said[1] == second or (second is None and said[1].startswith("Try next: "))


@pytest.mark.usefixtures("loaded")
def test_a_busy_machine_is_told(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = "other processes use the CPU"
    monkeypatch.setattr("moaspec.calibration.first_use._why_not", lambda *_: busy)
    output = cli("demo", "--max-new-tokens", "4", "--threads", "1")
    assert f"Not measured, because {busy}." in output.err


@pytest.mark.parametrize(
    ("speculative_s", "model", "drafted", "command"),
    [
        (1.0, MODEL, True, "moaspec chat"),
        (2.0, MODEL, True, "moaspec calibrate"),
        (2.0, "some/model", False, "moaspec chat --model some/model"),
    ],
)
def test_what_to_try_next(speculative_s: float, model: str, drafted: bool, command: str) -> None:
    first, second = shown(a_race(speculative_s), 1, model, drafted=drafted)[-2:]
    assert first.startswith(f"Try next: {command}  (")
    assert second.split()[:3] == ["moaspec", "serve", "--open"]


# Panes


def decodings() -> tuple[TimedDecoding, TimedDecoding]:
    target, prompt = text_target(), tiny.PROMPTS[0]
    return TimedDecoding(target, None, prompt, 3), TimedDecoding(target, None, prompt, 3)


@pytest.mark.parametrize("width", [50, 80, 200])
def test_panes_stand_side_by_side(width: int) -> None:
    plain, speculative = decodings()
    plain.advance()
    screen = Console(file=io.StringIO(), width=width)
    screen.print(demo.panes("Prompt 1: Why?", plain, speculative))
    assert isinstance(screen.file, io.StringIO)
    heading, top, names, *lines = screen.file.getvalue().splitlines()
    assert heading.strip() == "Prompt 1: Why?"
    assert max(map(len, (top, *lines))) <= width
    assert re.fullmatch(r"│ plain +│ speculative +│", names)
    assert any(re.match(r"│ 1 tokens, 1 target +.*│ 0 tokens, 0 target", line) for line in lines)


def test_tokens_are_coloured_by_source() -> None:
    plain, speculative = decodings()
    plain.pieces.append(("drafted words", "draft"))
    screen = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
    screen.print(demo.panes("Why?", plain, speculative))
    assert isinstance(screen.file, io.StringIO)
    assert "\x1b[1;32mdrafted words" in screen.file.getvalue()


def test_a_race_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "FRAME_S", 0.0)
    plain, speculative = decodings()
    parent, child = pty.openpty()
    seen: list[bytes] = []

    def read() -> None:
        with os.fdopen(parent, "rb", buffering=0) as file:
            while b"the end" not in b"".join(seen):
                seen.append(file.read(4096))

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(child, "w") as file:
        screen = Console(file=file, width=80, height=30, _environ={"TERM": "xterm"})
        assert demo.show_race("Why?", plain, speculative, screen, stop=lambda: False)
        screen.print("the end")
        reader.join(timeout=60)
    text = b"".join(seen).decode()
    assert "1 tokens, 1 target passes" in text
    assert "3 tokens, 3 target passes" in text
    assert "speculative, done" in text
    assert ESCAPE in text
