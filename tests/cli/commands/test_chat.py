"""`moaspec chat`: what it answers, keeps and forgets."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from transformers.utils import logging

import moaspec
import tiny
from commands import load_targets_by
from moaspec.cli.chat import LocalChat
from moaspec.generation.session import Session
from moaspec.target.target import Target
from moaspec_core.cli.main import run
from moaspec_core.cli.prompts import conversation_ids
from moaspec_core.engine.engine import Engine
from moaspec_core.engine.generate_options import GenerateOptions
from moaspec_core.errors import InputError

NEW = 6
ROLES = "{{ {'system': 'w1', 'user': 'w2', 'assistant': 'w3'}[message.role] }} "
TEMPLATE = "{% for message in messages %}" + ROLES + "{{ message.content }} {% endfor %}w3"


def chat_target(template: str | None = TEMPLATE) -> Target:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    return tiny.fresh_target(tokenizer=tokenizer)


@pytest.fixture
def talk() -> LocalChat:
    target = chat_target()
    settings: GenerateOptions = {"max_new_tokens": NEW, "tree": "chain:2"}
    return LocalChat(Session(target, tiny.random_drafter(target)), settings)


def say(talk: LocalChat, patch: pytest.MonkeyPatch, *lines: str) -> int:
    """Types lines; how many turns there were before it left or input ended."""
    patch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    turns = 0
    while talk.turn():
        turns += 1
    return turns


def answer(target: Target, ids: list[int], **options: Any) -> str:
    result = moaspec.generate(target, ids, max_new_tokens=NEW, **options)
    return " ".join(f"w{token}" for token in result.token_ids)


def ids(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split()]


def test_answers_see_the_whole_conversation(
    talk: LocalChat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = talk.session.target
    assert say(talk, monkeypatch, "w5 w9", "", "w7") == 3
    first = answer(target, ids("w2 w5 w9 w3"))
    second = answer(target, ids(f"w2 w5 w9 w3 {first} w2 w7 w3"))
    assert capsys.readouterr().out.split() == [*first.split(), *second.split()]
    # All but what the template adds after the first answer, whose last token was not read yet.
    assert talk.session.result.num_reused_tokens == 4 + NEW - 1


def test_system_seed_and_reset(
    talk: LocalChat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = talk.session.target
    talk.settings["temperature"] = 1.5
    say(talk, monkeypatch, "/seed 5", "/system w40 w41", "w5", "/reset", "/system", "w5")
    assert talk.settings["seed"] == 5
    sampled: dict[str, Any] = {"temperature": 1.5, "seed": 5}
    with_system = answer(target, ids("w1 w40 w41 w2 w5 w3"), **sampled)
    without = answer(target, ids("w2 w5 w3"), **sampled)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("w")] == [with_system, without]
    assert len(talk.messages) == 2
    say(talk, monkeypatch, "/seed")
    assert talk.settings["seed"] is None


def test_stats_and_help(
    talk: LocalChat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(talk, monkeypatch, "/stats", "/help")
    captured = capsys.readouterr()
    assert "Nothing has been answered" in captured.err
    assert "/system TEXT" in captured.out
    say(talk, monkeypatch, "w5", "w6", "/stats")
    out = " ".join(capsys.readouterr().out.split())
    assert f"last answer: {NEW} tokens" in out
    assert f"conversation: 2 answers, {2 * NEW} tokens, tau" in out


@pytest.mark.parametrize(
    ("line", "message"),
    [("/seed x", "integer"), ("/seed -1", "seed"), ("/what", "Unknown command /what")],
)
def test_bad_commands_are_said_and_survived(
    line: str,
    message: str,
    talk: LocalChat,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert say(talk, monkeypatch, line, "/exit", "w5") == 1
    assert message in capsys.readouterr().err


def test_exit_with_words_behind_it(talk: LocalChat, monkeypatch: pytest.MonkeyPatch) -> None:
    assert say(talk, monkeypatch, "/exit now", "w5") == 0


def test_a_line_that_is_no_text(
    talk: LocalChat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(talk, monkeypatch, "w5 \udcff", "w7")
    assert "UTF-8" in capsys.readouterr().err
    assert [message["content"] for message in talk.messages[::2]] == ["w7"]
    stdin = io.TextIOWrapper(io.BytesIO(b"w5\xff\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(InputError, match="UTF-8"):
        talk.turn()


def test_a_conversation_that_is_too_long(
    talk: LocalChat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(talk, monkeypatch, "w5", "w6 " * 300, "w7")
    assert "context" in capsys.readouterr().err
    assert [message["content"] for message in talk.messages[::2]] == ["w5", "w7"]


def test_ctrl_c_keeps_what_was_said(
    talk: LocalChat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step, steps = Engine.step, 0

    def interrupted(self: Engine) -> Any:
        nonlocal steps
        steps += 1
        if steps == 2:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    assert say(talk, monkeypatch, "w5 w9", "w7") == 2
    target = talk.session.target
    first = answer(target, ids("w2 w5 w9 w3")).split()[0]
    second = answer(target, ids(f"w2 w5 w9 w3 {first} w2 w7 w3"))
    assert capsys.readouterr().out.split() == [first, *second.split()]


def test_ctrl_c_while_typing_stays(
    talk: LocalChat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    assert talk.turn()
    assert "Ctrl-D" in capsys.readouterr().err


def test_templates_that_cannot_do_it() -> None:
    with pytest.raises(InputError, match="no chat template"):
        conversation_ids(chat_target(None), [])
    refusing = chat_target("{{ raise_exception('no system prompts') }}")
    with pytest.raises(InputError, match="no system prompts"):
        conversation_ids(refusing, [{"role": "system", "content": "w1"}])


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    target = chat_target()
    load_targets_by(monkeypatch, lambda *_, **__: target)
    monkeypatch.setattr("moaspec.cli.loading.bundled_drafters", dict)
    yield target
    logging.set_verbosity_warning()
    logging.enable_progress_bar()


def test_the_command_reads_a_pipe(
    command: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["moaspec", "chat", "--max-new-tokens", str(NEW)])
    monkeypatch.setattr(sys, "stdin", io.StringIO("w5 w9\n"))
    with pytest.raises(SystemExit) as caught:
        run()
    assert not caught.value.code
    assert capsys.readouterr().out.strip() == answer(command, ids("w2 w5 w9 w3"))


def test_numbers_are_checked_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load_targets_by(monkeypatch, lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr("sys.argv", ["moaspec", "chat", "--max-new-tokens", "-1"])
    with pytest.raises(SystemExit) as caught:
        run()
    assert caught.value.code == 2
    assert "--max-new-tokens" in capsys.readouterr().err
