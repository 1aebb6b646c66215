"""Tool calls in the forms of several models, whole and in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

import serving
from moaspec.serve.calls import HERMES, LLAMA, MISTRAL, CallForm, CallReader, Tool, form_of
from moaspec.serve.prompts import ChatPrompt
from serving import say

TOOL = Tool("time", "Tells the time.", {"type": "object", "properties": {}})
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


FORMS = {
    "llama": '{{ tools | tojson }} {"name": ..., "parameters": ...} {{ messages }}',
    "mistral": "{{ tools | tojson }} [TOOL_CALLS] {{ messages }}",
}


@pytest.mark.parametrize("template", FORMS.values(), ids=FORMS)
def test_forced_calls_in_the_templates_form(template: str) -> None:
    parameters = {"enum": [{"city": "Rome"}, {"city": "a; b"}]}
    tool: Any = {"type": "function", "function": {"name": "time", "parameters": parameters}}
    messages: Any = say("time?")
    with serving.serving(serving.source(template=template)) as served:
        answer = served.openai().chat.completions.create(
            model=serving.MODEL,
            messages=messages,
            tools=[tool],
            tool_choice="required",
            max_tokens=150,
            seed=3,
        )
        asked = {"model": serving.MODEL, "messages": messages, "tools": [tool]}
        limits = {"tool_choice": "required", "max_tokens": 150, "seed": 3}
        with served.http() as client:
            raw = client.post("/v1/chat/completions", json=asked | limits)
    assert raw.json()["choices"][0]["message"]["content"] is None
    calls: Any = answer.choices[0].message.tool_calls
    assert calls
    for call in calls:
        assert json.loads(call.function.arguments) in parameters["enum"]


def test_forms_are_found_in_templates() -> None:
    assert form_of("{{ tools }} <tool_call> ...") is HERMES
    assert form_of('{{ tools }} {"name": ..., "parameters": ...}') is LLAMA
    assert form_of("{{ tools }} [TOOL_CALLS]") is MISTRAL
    assert form_of("nothing known") is HERMES


TOOLS_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}|{% endfor %}"
)


def rendered(template: str, messages: list[dict[str, Any]], *tools: Tool) -> str:
    facts = serving.source(template=template).facts
    ids = ChatPrompt(facts).ids(messages, tools)
    return str(facts.tokenizer.decode(ids))


CONVERSATION: list[dict[str, Any]] = [
    *say("time?"),
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "1",
                "type": "function",
                "function": {"name": "time", "arguments": '{"city": "Rome"}'},
            }
        ],
    },
    {"role": "tool", "content": "noon", "tool_call_id": "1"},
]


def test_templates_that_know_tools_get_them() -> None:
    text = rendered(TOOLS_TEMPLATE, CONVERSATION, TOOL)
    assert text.startswith(json.dumps([TOOL.as_json()], sort_keys=False)[:20])
    assert "assistant:Rome|tool:noon|" in text


def test_templates_that_do_not_are_told_in_text() -> None:
    text = rendered(serving.CHATML, CONVERSATION, TOOL)
    assert text.startswith("<|start|>system\n")
    assert "Tells the time." in text
    assert f"<tool_call>\n{CALL}\n</tool_call>" in text
    assert "<tool_response>\nnoon\n</tool_response>" in text
    own = [{"role": "system", "content": "Be kind."}, *say("x")]
    assert rendered(serving.CHATML, own, TOOL).startswith("<|start|>system\nBe kind.\n\nYou can")
