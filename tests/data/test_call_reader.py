"""Tool calls read back in the forms of several models, whole and in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moaspec.data.call_forms import HERMES, LLAMA, MISTRAL, CallForm, form_of
from moaspec.data.call_reader import CallReader

CALL = '{"name": "time", "arguments": {"city": "Rome"}}'
LLAMA_CALL = '{"name": "time", "parameters": {"city": "Rome"}}'


def read(form: CallForm, text: str, size: int) -> tuple[str, list[dict[str, Any]]]:
    """What is said and called, fed in pieces of some length."""
    reader = CallReader(form, ["time"])
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    said = "".join(reader.feed(piece, last=False)[0] for piece in pieces)
    said += reader.feed("", last=True)[0]
    return said, [json.loads(call.arguments) for call in reader.calls]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("form", "text", "said", "calls"),
    [
        (HERMES, "no call here", "no call here", 0),
        (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", 1),
        (HERMES, f"Look: <tool_call>{CALL}</tool_call>", "Look: ", 1),
        (HERMES, f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>\n", "", 2),
        (HERMES, f"<tool_call>{CALL}", "", 1),  # the text ended within its last mark
        (HERMES, "a <tool b", "a <tool b", 0),
        (HERMES, "<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", 0),
        (HERMES, '<tool_call>{"name": "x"}', '<tool_call>{"name": "x"}', 0),
        (LLAMA, LLAMA_CALL, "", 1),
        (LLAMA, f"{LLAMA_CALL};{LLAMA_CALL}", "", 2),
        (LLAMA, f"{LLAMA_CALL}\n{LLAMA_CALL}\n", "", 2),
        (LLAMA, f"{LLAMA_CALL}\n{LLAMA_CALL[:-5]}", f"\n{LLAMA_CALL[:-5]}", 1),  # at the limit
        (LLAMA, f"Look: {LLAMA_CALL}", f"Look: {LLAMA_CALL}", 0),
        (LLAMA, "plain { text", "plain { text", 0),
        (LLAMA, '{"other": 1}', '{"other": 1}', 0),
        (MISTRAL, f"[TOOL_CALLS][{CALL}, {CALL}]", "", 2),
        (MISTRAL, f"[TOOL_CALLS] {CALL}", "", 1),
        (MISTRAL, "[TOOL", "[TOOL", 0),
    ],
)
def test_reading(form: CallForm, text: str, said: str, calls: int, size: int) -> None:
    assert read(form, text, size) == (said, [{"city": "Rome"}] * calls)


def test_text_in_arguments_may_have_marks_of_calls() -> None:
    text = '{"name": "time", "parameters": {"city": "Rome; or {Oslo}"}}'
    assert read(LLAMA, text, 5) == ("", [{"city": "Rome; or {Oslo}"}])


def test_forms_are_found_in_templates() -> None:
    assert form_of("{{ tools }} <tool_call> ...") is HERMES
    assert form_of('{{ tools }} {"name": ..., "parameters": ...}') is LLAMA
    assert form_of("{{ tools }} [TOOL_CALLS]") is MISTRAL
    assert form_of("nothing known") is HERMES
