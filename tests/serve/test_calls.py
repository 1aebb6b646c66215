"""Tools in the prompts of several templates, and calls in the form that a template asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest

import serving
from moaspec.data.chat_template import ChatTemplate
from moaspec.data.messages import normal_messages
from moaspec.serve.calls import Tool
from serving import say

TOOL = Tool.of({"name": "time", "description": "Tells the time."})
CALL = '{"name": "time", "arguments": {"city": "Rome"}}'


FORMS = {
    "llama": '{{ tools | tojson }} {"name": ..., "parameters": ...} {{ messages }}',
    "mistral": "{{ tools | tojson }} [TOOL_CALLS] {{ messages }}",
}


@pytest.mark.slow
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


TOOLS_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments.city }}"
    "{% endfor %}|{% endfor %}"
)


def rendered(template: str, messages: list[dict[str, Any]], *tools: Tool) -> str:
    facts = serving.source(template=template).facts
    renderer = ChatTemplate(facts.tokenizer)
    ids = renderer.ids(normal_messages(messages), [tool.given for tool in tools])
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
    assert text.startswith(json.dumps([TOOL.given])[:20])
    assert "assistant:time Rome|tool:noon|" in text


def test_templates_that_do_not_are_told_in_text() -> None:
    text = rendered(serving.CHATML, CONVERSATION, TOOL)
    assert text.startswith("<|start|>system\n")
    assert "Tells the time." in text
    assert f"<tool_call>\n{CALL}\n</tool_call>" in text
    assert "<tool_response>\nnoon\n</tool_response>" in text
    own = [{"role": "system", "content": "Be kind."}, *say("x")]
    assert rendered(serving.CHATML, own, TOOL).startswith("<|start|>system\nBe kind.\n\nYou can")
