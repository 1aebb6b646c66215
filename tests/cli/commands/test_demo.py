"""`moaspec demo`: its JSON, its panes, and what it prints where nothing can be redrawn."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

import tiny
from commands import Cli, load_targets_by, text_target
from moaspec.cli import demo, panes, race_verdict
from moaspec.cli.panes import Pane
from moaspec.evaluate import race
from moaspec.evaluate.correctness.equality import Equality
from moaspec.evaluate.race import DecodingStats, Race, Races, TimedDecoding
from moaspec.target.target import Target
from moaspec_core.cli.options import MODEL
from moaspec_core.engine.engine import Engine

pytestmark = pytest.mark.essential

ESCAPE = "\x1b"
SAME = Equality("identical")


def a_race(plain_s: float, speculative_s: float, equality: Equality = SAME) -> Race:
    return Race(
        name="explain",
        prompt="Why?",
        plain=DecodingStats(tokens=60, seconds=plain_s, passes=60),
        speculative=DecodingStats(tokens=60, seconds=speculative_s, passes=30, accepted=30),
        equality=equality,
    )


@pytest.fixture(autouse=True)
def _nothing_to_dequantise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny target needs no weights of the real one."""
    monkeypatch.setattr("moaspec.target.registry.must_dequantise", lambda _: False)


# The command


@pytest.mark.usefixtures("loaded")
def test_demo_in_a_pipe(cli: Cli) -> None:
    output = cli("demo", "--max-new-tokens", "6", "--threads", "1")
    assert output.code == 0
    assert ESCAPE not in output.out + output.err
    for number in (1, 2, 3):
        assert f"Prompt {number} of " in output.out
    for words in ("plain: 6 tokens, 6 target passes", "speculative: 6 tokens", "same text"):
        assert words in output.out
    assert "Verdict: " in output.words
    assert output.out.index("Verdict: ") < output.out.index("Try next: ")
    assert "hf" not in output.out
    steps = output.err.splitlines()
    assert steps[-1] == "Timing the first tokens of both"
    assert any("passes and drafts cost here (once, about " in step for step in steps)


@pytest.mark.usefixtures("loaded")
def test_demo_as_json(cli: Cli) -> None:
    output = cli("demo", "--max-new-tokens", "5", "--json")
    assert output.code == 0
    data = json.loads(output.out)
    assert data["lossless"]
    assert data["drafts"] == "drafter"
    assert data["plain"]["tokens"] == data["speculative"]["tokens"] == 5 * len(data["prompts"])
    assert data["speedup"] == pytest.approx(
        data["speculative"]["tokens_per_s"] / data["plain"]["tokens_per_s"]
    )
    assert {*data["steps_s"]} >= {
        "Loading PyTorch and transformers",
        "Timing the first tokens of both",
    }


@pytest.mark.slow
@pytest.mark.usefixtures("loaded")
def test_a_model_without_a_drafter_shows_copies(cli: Cli) -> None:
    """Its prompts are about code, and what repeats the prompt is copied."""
    asked = ("demo", "--model", "qwen2.5-coder-0.5b", "--max-new-tokens", "30")
    output = cli(*asked)
    assert output.code == 0
    assert "No drafter is bundled for qwen2.5-coder-0.5b: drafts are continuations" in output.out
    assert re.search(r"Prompt 1 of [3-6]: Write a Python function", output.out)
    assert "Try next: moaspec chat --model qwen2.5-coder-0.5b  " in output.out
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
    warm_up = 4 * demo.WARM_UP_TOKENS
    interrupt_at(monkeypatch, warm_up + 20)
    output = cli("demo", "--max-new-tokens", "50")
    assert output.code == 130
    assert "Prompt 1 of " in output.out
    assert "speculative: " in output.out
    assert "Prompt 2 of " not in output.out
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
    interrupt_at(monkeypatch, 4 * demo.WARM_UP_TOKENS + 20)
    output = cli("demo", "--max-new-tokens", "50", "--json")
    assert output.code == 130
    assert json.loads(output.out)["prompts"] == []


# What is said


def test_a_gain() -> None:
    races = Races([a_race(2.0, 1.5), a_race(2.0, 1.0)])
    assert race_verdict.verdict(races) == (
        "Verdict: 1.60x as fast, same text, 50% fewer passes (2 prompts, 120 tokens)."
    )
    assert race_verdict.reason(races) is None


def test_no_gain_and_why() -> None:
    races = Races([a_race(2.0, 2.0)])
    assert race_verdict.verdict(races) == (
        "Verdict: no gain (1.00x), same text, 50% fewer passes (1 prompt, 60 tokens)."
    )
    assert race_verdict.reason(races) == (
        "Reason: a speculative pass gave 2.00 tokens but took 2.00 times as long as a plain one, "
        "drafting included."
    )


def test_no_gain_where_no_draft_was_accepted() -> None:
    race = a_race(2.0, 2.0)
    races = Races([replace(race, speculative=race.plain)])
    assert "no draft was accepted" in str(race_verdict.reason(races))


def test_no_verdict_on_speed_where_the_machine_is_not_measured() -> None:
    race = a_race(2.0, 2.0)
    races = Races([replace(race, speculative=race.plain)])
    busy = "other processes use the CPU"
    assert race_verdict.verdict(races, busy) == (
        "Verdict: none on speed, this machine is not measured; same text (1 prompt, 60 tokens)."
    )
    assert str(race_verdict.reason(races, busy)).startswith(
        f"Reason: it is not measured, because {busy}. "
    )
    gained = Races([a_race(2.0, 1.0)])
    assert race_verdict.verdict(gained, busy) == race_verdict.verdict(gained)
    assert race_verdict.reason(gained, busy) is None


@pytest.mark.usefixtures("loaded")
def test_a_busy_machine_is_the_reason_that_is_told(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = "other processes use the CPU"
    monkeypatch.setattr("moaspec.calibration.first_use._why_not", lambda *_: busy)
    monkeypatch.setattr(race_verdict, "_gained", lambda _: False)
    output = cli("demo", "--max-new-tokens", "4", "--threads", "1")
    assert f"Not measured, because {busy}." in output.err
    assert f"because {busy}. Without its costs" in output.words
    assert "no gain" not in output.words


def test_ties_are_told() -> None:
    races = Races([a_race(2.0, 1.0), a_race(2.0, 1.0, Equality("near_tie", 3, 0.01, 0.1))])
    assert "2.00x as fast, same text up to ties in rounding, 50%" in race_verdict.verdict(races)


def test_as_many_passes_are_no_gain() -> None:
    """The seconds then differ by what else the machine did."""
    one = a_race(2.0, 1.0)
    undrafted = replace(one.speculative, passes=60, accepted=0)
    races = Races([replace(one, speculative=undrafted)])
    expected = "Verdict: no gain (2.00x), same text, as many passes"
    assert race_verdict.verdict(races).startswith(expected)
    assert "no draft was accepted" in str(race_verdict.reason(races))


def test_no_speed_of_wrong_texts() -> None:
    races = Races([a_race(2.0, 1.0), a_race(2.0, 1.0, Equality("different"))])
    assert race_verdict.verdict(races) == "Verdict: FAULT, 1 of 2 texts is not the model's own."
    assert "moaspec check" in str(race_verdict.reason(races))


@pytest.mark.parametrize(
    ("pair_s", "asked", "planned"),
    [
        (0.001, None, (6, 96)),  # fast: as much as a viewer may want to read
        (0.025, None, (4, 96)),
        (0.04, None, (3, 96)),
        (0.12, None, (3, 33)),  # slow: shorter texts
        (5.0, None, (3, 32)),
        (5.0, 7, (3, 7)),
        (0.001, 500, (6, 500)),
    ],
)
def test_as_much_as_there_is_time_for(
    pair_s: float, asked: int | None, planned: tuple[int, int]
) -> None:
    assert demo.plan(pair_s, asked) == planned


@pytest.mark.parametrize(
    ("speculative_s", "model", "drafted", "command"),
    [
        (1.0, MODEL, True, "moaspec chat "),
        (2.0, MODEL, True, "moaspec calibrate "),
        (2.0, "some/model", False, "moaspec chat --model some/model "),
    ],
)
def test_what_to_try_next(speculative_s: float, model: str, drafted: bool, command: str) -> None:
    screen, races = Console(file=io.StringIO(), width=200), Races([a_race(2.0, speculative_s)])
    race_verdict.show_verdict(races, screen, model=model, drafted=drafted)
    assert isinstance(screen.file, io.StringIO)
    first, second = screen.file.getvalue().splitlines()[-2:]
    assert first.startswith(f"Try next: {command}")
    assert second.split()[:3] == ["moaspec", "serve", "--open"]


# Panes

WORDS = "The sky is blue because air scatters blue light more than red light."
PLAIN = Pane(
    "plain", [(WORDS, "target")], DecodingStats(tokens=14, seconds=1.0, passes=14), done=True
)
DRAFTED = Pane(
    "speculative",
    [(WORDS[:20], "draft"), (WORDS[20:40], "target"), (WORDS[40:60], "copy")],
    DecodingStats(tokens=12, seconds=0.75, passes=6, accepted=4, copied=4),
    done=False,
)


def drawn(width: int, *, text_rows: int | None = None, **settings: Any) -> str:
    file = io.StringIO()
    screen = Console(file=file, width=width, height=30, markup=False, **settings)
    shown = panes.frame("Prompt 1 of 6: Why?", (PLAIN, DRAFTED), screen, text_rows=text_rows)
    screen.print(shown)
    return file.getvalue()


def test_panes_stand_side_by_side() -> None:
    assert drawn(80) == (
        "Prompt 1 of 6: Why?\n"
        "╭──────────── plain, done ────────────╮╭──────────── speculative ────────────╮\n"
        "│ The sky is blue because air         ││ The sky is blue because air         │\n"
        "│ scatters blue light more than red   ││ scatters blue light more than re    │\n"
        "│ light.                              ││                                     │\n"
        "│ ─────────────────────────────────── ││ ─────────────────────────────────── │\n"
        "│ 14 tokens, 14 target passes         ││ 12 tokens, 6 target passes          │\n"
        "│ 14.0 tokens/s, 1.00 s               ││ 16.0 tokens/s, 0.75 s               │\n"
        "╰─────────────────────────────────────╯╰─────────────────────────────────────╯\n"
    )


@pytest.mark.parametrize("width", [70, 80, 120, 200])
def test_no_word_is_broken(width: int) -> None:
    lines = drawn(width).splitlines()
    assert max(map(len, lines)) <= width
    shown = {word for line in lines for word in line.replace("│", " ").split()}
    assert set(WORDS.split()) <= shown


def test_the_last_rows_are_shown_while_there_is_little_room() -> None:
    shown = drawn(80, text_rows=1)
    assert "light." in shown
    assert "The sky" not in shown
    assert len(drawn(80, text_rows=9).splitlines()) == len(shown.splitlines()) + 8


def test_long_prompts_are_shortened_between_words() -> None:
    short = panes.shortened("many words " * 50)
    assert len(short) <= panes.PROMPT_CHARACTERS
    assert short.endswith("words ...") or short.endswith("many ...")


def test_tokens_are_coloured_by_source() -> None:
    shown = drawn(80, force_terminal=True, color_system="standard")
    assert "\x1b[1;32mThe" in shown
    assert "\x1b[1;36m" in shown


@pytest.mark.parametrize("settings", [{"no_color": True}, {"color_system": None}])
def test_without_colours_bold_is_explained(settings: dict[str, Any]) -> None:
    options: dict[str, Any] = {"force_terminal": True, "color_system": "standard", **settings}
    assert "\x1b[32m" not in drawn(80, **options)
    plain = panes.legend(Console(file=io.StringIO(), **options)).plain
    assert plain == "Tokens: drafted and accepted, the target's own"
    coloured = panes.legend(Console(file=io.StringIO(), force_terminal=True, color_system="256"))
    assert "copied" in coloured.plain


def terminal(file: Any, **settings: Any) -> Console:
    options: dict[str, Any] = {"width": 80, "height": 30, "_environ": {"TERM": "xterm"}}
    return Console(file=file, markup=False, **{**options, **settings})


def test_what_can_be_redrawn() -> None:
    parent, child = pty.openpty()
    with os.fdopen(parent, "rb"), os.fdopen(child, "w") as file:
        assert panes.can_redraw(terminal(file))
        assert not panes.can_redraw(terminal(file, _environ={"TERM": "dumb"}))
        assert not panes.can_redraw(terminal(file, width=69))
        assert not panes.can_redraw(terminal(file, height=8))
    assert not panes.can_redraw(terminal(io.StringIO(), force_terminal=True))  # FORCE_COLOR


def test_a_race_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panes, "FRAME_S", 0.0)
    target, prompt = text_target(), tiny.PROMPTS[0]
    plain, speculative = (
        TimedDecoding(target, None, prompt, 3),
        TimedDecoding(target, None, prompt, 3),
    )
    parent, child = pty.openpty()
    seen: list[bytes] = []

    def read() -> None:
        with os.fdopen(parent, "rb", buffering=0) as file:
            while b"the end" not in b"".join(seen):
                seen.append(file.read(4096))

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(child, "w") as file:
        screen = terminal(file)
        assert panes.show_race("Why?", plain, speculative, screen, stop=lambda: False, last=True)
        screen.print("the end")
        reader.join(timeout=60)
    text = b"".join(seen).decode()
    assert "1 tokens, 1 target passes" in text
    assert "3 tokens, 3 target passes" in text
    assert "speculative, done" in text
    assert ESCAPE in text


def test_a_prompt_in_a_line_of_80_columns() -> None:
    line = " ".join(panes.result_line(1, a_race(100.0, 50.0)).split())
    assert line == "1. explain plain 100.00 s, speculative 50.00 s, 2.00x, same text"
    for kind in ("identical", "near_tie", "different"):
        assert len(panes.result_line(1, a_race(100.0, 50.0, Equality(kind)))) <= 80
