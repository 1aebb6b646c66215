"""Text that may be shown: whole characters, no stop strings, nothing that may become one."""

from __future__ import annotations

import pytest

import serving
from moaspec_core.engine.request_state import StopReason
from moaspec_serve.sources.source import TokenSource, Update
from moaspec_serve.sources.text_writer import TextWriter

SOURCES: tuple[TokenSource, ...] = ("target",) * 100


def updates(text: str | bytes, size: int, end: StopReason) -> list[Update]:
    """Tokens of a text (a byte each), some at a time."""
    data = text.encode() if isinstance(text, str) else text
    letters = serving.tokenizer()
    ids = [letters.convert_tokens_to_ids(one) for one in _names(data)]
    parts = [tuple(ids[i : i + size]) for i in range(0, len(ids), size)]
    return [
        Update(
            token_ids=part,
            sources=SOURCES[: len(part)],
            stop_reason=end if number == len(parts) - 1 else None,
        )
        for number, part in enumerate(parts)
    ]


def _names(data: bytes) -> list[str]:
    """Byte-level tokenizers' names of bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [one for one in range(256) if one not in plain]
    names = {one: chr(one) for one in plain} | {one: chr(256 + i) for i, one in enumerate(other)}
    return [names[one] for one in data]


def written(text: str | bytes, *stop: str, size: int, end: StopReason = "stop_token") -> list[str]:
    writer = TextWriter(serving.tokenizer(), stop)
    found = [writer.take(update) for update in updates(text, size, end)]
    return ["".join(piece.text for piece in pieces) for pieces in found]


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize("text", ["plain", "für 日本 \U0001f600!", "a\n\n b"])
def test_characters_are_whole(text: str, size: int) -> None:
    parts = written(text, size=size)
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_a_text_that_ends_within_a_character_says_so() -> None:
    assert "".join(written("ab\u00fc".encode()[:-1], size=1)) == "ab\ufffd"


@pytest.mark.parametrize("size", [1, 2, 100])
def test_stop_strings_are_cut_out(size: int) -> None:
    parts = written("one two", "two", size=size, end="stop_string")
    assert "".join(parts) == "one "


def test_what_may_begin_a_stop_string_waits() -> None:
    assert written("abcabd", "abd", size=1, end="stop_string") == ["", "", "abc", "", "", ""]
    assert written("xab", "abd", size=1) == ["x", "", "ab"]


def test_the_earliest_of_several_counts() -> None:
    assert "".join(written("a b c", " c", " b", size=9, end="stop_string")) == "a"
