"""Text from pipes and files, as it comes on Windows."""

import io
import sys
from pathlib import Path

import pytest

from moaspec.cli.chat import _hold
from moaspec_core.cli.options import read_lines
from moaspec_core.cli.prompts import read_prompt
from moaspec_core.cli.terminal.chat_loop import ChatLoop

TEXT = "caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{CJK UNIFIED IDEOGRAPH-65E5}"


@pytest.mark.parametrize("written", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("system", ["cp1252", "cp932", "utf-8"])
def test_a_pipe_is_utf8_whatever_the_systems_encoding_is(
    written: str, system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    piped = io.BytesIO(f"{TEXT}\r\n".encode(written))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(piped, encoding=system))
    assert read_prompt(None) == TEXT


def test_questions_from_a_pipe_are_utf8_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Loop(ChatLoop):
        def answer(self, question: str) -> None:
            asked.append(question)

        def stats(self) -> str:
            return ""

        def forget(self) -> None:
            asked.clear()

    piped = io.BytesIO(f"{TEXT}\r\n{TEXT}\r\n".encode("utf-8-sig"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(piped, encoding="cp1252"))
    _hold(Loop({}))
    assert asked == [TEXT, TEXT]


def test_a_file_may_begin_with_a_mark_of_its_encoding(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(f"{TEXT}\r\n".encode("utf-8-sig"))
    assert read_lines("--token-file", tmp_path / "token") == [TEXT]
