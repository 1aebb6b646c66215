"""`moaspec chat --url` against a real server."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import serving
from edges import Edge
from links import patient_link
from moaspec.cli.chat_url import TAKEN_BACK, ServerChat, _Printer
from moaspec_core.cli.main import run
from moaspec_core.cli.terminal.console import escape_unsafe
from moaspec_core.engine.generate_options import GenerateOptions
from moaspec_core.errors import InputError, ServerError
from serving import Served

SETTINGS: GenerateOptions = {"max_new_tokens": 12, "temperature": 0.0}


@pytest.fixture(scope="module", params=["serve", "edge"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    source = serving.source() if request.param == "serve" else Edge().source
    with patient_link(), serving.serving(source) as running:
        yield running


def say(talk: ServerChat, patch: pytest.MonkeyPatch, *lines: str) -> None:
    patch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    while talk.turn():
        pass
    talk.close()


def test_answers_are_the_servers(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = ServerChat(served.api, {**SETTINGS})
    say(talk, monkeypatch, "hello", "/stats", "/reset", "/stats")
    captured = capsys.readouterr()
    assert escape_unsafe(serving.own_text("hello", 12).split()[0]) in captured.out
    assert "last answer: 12 tokens" in captured.out
    assert "tau" in captured.out
    assert "Nothing has been answered" in captured.err
    assert talk.messages == []


def test_a_gateway_may_drop_what_it_does_not_know(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text is shown all the same, and is the answer that the next turn goes on from."""
    talk = ServerChat(served.api, {**SETTINGS})
    stream = talk._server.stream

    def plain(*args: Any, **options: Any) -> Iterator[dict[str, Any]]:
        for chunk in stream(*args, **options):
            yield {name: value for name, value in chunk.items() if name != "moaspec"}

    monkeypatch.setattr(talk._server, "stream", plain)
    say(talk, monkeypatch, "hello")
    shown = "".join(capsys.readouterr().out.split())  # the terminal sets tabs
    assert shown == "".join(escape_unsafe(serving.own_text("hello", 12)).split())


def test_refusals_are_said(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = ServerChat(served.url, {**SETTINGS})
    say(talk, monkeypatch, "x" * serving.CONTEXT)
    assert "answered 400" in capsys.readouterr().err


@pytest.mark.slow
def test_nobody_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ServerError, match="No moaspec server answers"):
        ServerChat("http://127.0.0.1:1", {**SETTINGS})
    monkeypatch.setattr(sys, "argv", ["moaspec", "chat", "--url", "http://127.0.0.1:1"])
    with pytest.raises(SystemExit) as left:
        run()
    assert left.value.code == 1
    assert "moaspec serve" in capsys.readouterr().err


def test_an_address_without_a_scheme() -> None:
    with pytest.raises(InputError, match="the form http://localhost:8000"):
        ServerChat("localhost:8000", {**SETTINGS})


@pytest.mark.parametrize("option", [("--model", "m"), ("--tree", "chain:2"), ("--drafter", "none")])
def test_options_of_a_target_here(
    option: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["moaspec", "chat", "--url", "http://127.0.0.1:1", *option])
    with pytest.raises(SystemExit) as left:
        run()
    assert left.value.code == 2
    assert "they are the server's" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("key", ["schlüssel", "a\nb"])
def test_keys_that_no_header_holds(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOASPEC_API_KEY", key)
    with pytest.raises(InputError, match="no HTTP header"):
        ServerChat("http://127.0.0.1:1", {**SETTINGS})


def test_what_is_taken_back_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    def piece(text: str, was: str | None = None) -> dict[str, str]:
        return {"text": text, "source": "target", **({"was": was} if was else {})}

    printer = _Printer()
    for said in (
        {"provisional": [piece("a"), piece("b")]},
        {"provisional": [piece("a"), piece("b"), piece("c")]},
        {
            "pieces": [piece("a", "provisional"), piece("X", "corrected")],
            "provisional": [],
            "correction": {"confirmed": 1, "removed": 2, "text": "bc"},
        },
        {"pieces": [piece("Y")]},
    ):
        printer.show({"choices": [], "moaspec": said})
    assert capsys.readouterr().out == f"abc{TAKEN_BACK}XY"
