"""Word sequences that training rows share with evaluation prompts."""

from __future__ import annotations

import pytest

from moaspec.data.conversations import Conversation
from moaspec.data.overlap import overlaps
from moaspec_core.chat.messages import words
from moaspec_core.errors import DataError

PROMPTS = [
    Conversation(
        where="eval:1", messages=({"role": "user", "content": "One two, three FOUR five?"},)
    ),
    Conversation(where="eval:2", messages=({"role": "user", "content": "Why not"},)),
]


def row(*contents: str, role: str = "user") -> Conversation:
    messages = tuple({"role": role, "content": content} for content in contents)
    return Conversation(where="train:1", messages=messages)


def found(conversation: Conversation, size: int = 4) -> list[tuple[str, str]]:
    findings = overlaps(
        [conversation], PROMPTS, size=size, decode=lambda ids: " ".join(map(str, ids))
    )
    return [(finding.against, finding.words) for finding in findings]


def test_words_forget_case_punctuation_and_typography() -> None:
    assert words("Straße—ﬁne,  OK?\n") == ("strasse", "fine", "ok")


def test_sequences_are_found_anywhere() -> None:
    assert found(row("so: two three four five six")) == [("eval:1", "two three four five")]
    assert found(row("one two three")) == []
    assert found(row("nothing", "one two three four five", role="assistant")) == [
        ("eval:1", "one two three four")
    ]


def test_sequences_do_not_cross_messages_and_system_prompts_do_not_count() -> None:
    assert found(row("one two", "three four five")) == []
    assert found(row("one two three four five", role="system")) == []


def test_short_prompts_count_as_a_whole() -> None:
    assert found(row("why not!")) == [("eval:2", "why not")]
    assert found(row("why not now")) == []


def test_token_ids_are_decoded() -> None:
    prompt = Conversation(where="eval:3", messages=({"role": "user", "content": "7 8 9"},))
    training = Conversation(where="t:1", prompt_ids=(1,), response_ids=(6, 7, 8, 9))
    assert list(overlaps([training], [prompt], size=3, decode=lambda i: " ".join(map(str, i))))


def test_nothing_to_compare_with_is_no_clean_result() -> None:
    training, ids = row("one two three"), Conversation(where="ids", prompt_ids=(1,))
    for against in ([], [ids]):
        with pytest.raises(DataError, match="no text of a user"):
            list(overlaps([training], against, size=2, decode=str))
