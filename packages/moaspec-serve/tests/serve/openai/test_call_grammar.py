"""Tools in the prompts of several templates, and calls in the form that a template asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest

import serving
import templates
from moaspec_core.chat.call_forms import CallForm
from moaspec_core.chat.chat_template import ChatTemplate
from moaspec_core.chat.messages import normal_messages, normal_tool
from moaspec_serve.openai.call_grammar import call_grammar, closed
from serving import say

TOOL = normal_tool({"name": "time", "description": "Tells the time."})
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


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["Rome </tool_call>", 5, None]},
        "count": {"type": "integer", "minimum": 1, "maximum": 9},
        "place": {"$ref": "#/$defs/Place"},
        "sure": {"type": "boolean"},
        "odd": {"type": "string", "maxLength": 4, "enum": ["x", "yy"]},
    },
    "required": ["count", "sure"],
    "additionalProperties": False,
    "$defs": {"Place": {"type": "array", "items": {"enum": ["here"]}, "maxItems": 2}},
}
FREE = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


def form_of(name: str) -> CallForm:
    return ChatTemplate(serving.tokenizer(templates.TOOL_TEMPLATES[name])).form


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["qwen3-coder", "glm45", "llama4-python"])
def test_arguments_without_json_follow_the_schema(name: str, seed: int) -> None:
    tools: Any = [{"type": "function", "function": {"name": "go", "parameters": SCHEMA}}]
    with serving.serving(serving.source(template=templates.TOOL_TEMPLATES[name])) as served:
        messages: Any = say("go!")
        answer = served.openai().chat.completions.create(
            model=serving.MODEL,
            messages=messages,
            tools=tools,
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=600,
            seed=seed,
        )
    calls: Any = answer.choices[0].message.tool_calls
    (arguments,) = [json.loads(call.function.arguments) for call in calls]
    assert set(arguments) <= set(SCHEMA["properties"])
    assert arguments["count"] in range(1, 10)
    assert type(arguments["sure"]) is bool
    for key in ("kind", "odd"):
        assert arguments.get(key, "x") in (*SCHEMA["properties"][key]["enum"], "x")
    assert arguments.get("place", []) in ([], ["here"], ["here", "here"])


OPEN: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "deep": {"type": "object", "properties": {"x": {"type": "integer", "maximum": 9}}},
    },
    "required": ["city"],
}


def test_schemas_are_closed_where_they_name_all_keys() -> None:
    one, two = ({"type": "object", "properties": {name: {}}} for name in ("a", "b"))
    done = {"additionalProperties": False}
    assert closed(OPEN)["properties"]["deep"] == OPEN["properties"]["deep"] | done
    assert closed({"anyOf": [one, two]}) == {"anyOf": [one | done, two | done]}
    assert closed({"type": "array", "items": one})["items"] == one | done
    assert closed({"$defs": {"a": one}, "$ref": "#/$defs/a"})["$defs"]["a"] == one | done
    for schema in (
        {"allOf": [one, two]},
        {"type": "object"},
        one | {"required": ["b"]},
        one | {"patternProperties": {"^b": {}}},
        one | {"additionalProperties": {"type": "string"}},
    ):
        assert closed(schema) == schema


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}])
@pytest.mark.parametrize("max_tokens", [5, 30, 60, 200])
def test_forced_calls_have_the_schemas_keys_and_no_content(choice: Any, max_tokens: int) -> None:
    tools = [{"type": "function", "function": {"name": "time", "parameters": OPEN}}]
    body = {"model": serving.MODEL, "messages": say("time?"), "tools": tools, "seed": 4}
    body |= {"tool_choice": choice, "max_tokens": max_tokens}
    with serving.serving(serving.source()) as served, served.http() as http:
        whole = http.post("/v1/chat/completions", json=body).json()["choices"][0]
        lines = http.post("/v1/chat/completions", json=body | {"stream": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert not whole["message"]["content"]
    assert not any(delta.get("content") for delta in deltas)
    calls = whole["message"].get("tool_calls") or []
    assert sum(len(delta.get("tool_calls", ())) for delta in deltas) == len(calls)
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        assert arguments.keys() <= OPEN["properties"].keys()
        assert arguments.get("deep", {}).keys() <= {"x"}
    assert whole["finish_reason"] == ("tool_calls" if max_tokens == 200 else "length")
    if choice != "required" and max_tokens == 200:
        assert len(calls) == 1


@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize("special", [{}, {"<tool_call>": 3, "<arg_key>": 4, "</arg_value>": 5}])
@pytest.mark.parametrize("name", ["qwen3-coder", "glm45", "llama4-python"])
def test_grammars_of_calls_without_json(name: str, forced: bool, special: dict[str, int]) -> None:
    """A text of no length limit, alone and among others."""
    tools = [
        normal_tool({"name": "go", "parameters": one})["function"] for one in (FREE, SCHEMA, {})
    ]
    grammars = serving.source().info.grammars
    special = {} if name == "llama4-python" else special
    text = call_grammar(form_of(name), tools, forced=forced, parallel=True, special=special)
    assert grammars.lark(text)


@pytest.mark.parametrize("name", ["qwen3-coder", "llama4-python"])
def test_a_schema_that_does_not_name_the_arguments(name: str) -> None:
    tools: Any = [
        {"type": "function", "function": {"name": "go", "parameters": {"enum": [{"a": 1}]}}}
    ]
    asked = {"model": serving.MODEL, "messages": say("go!"), "tools": tools, "max_tokens": 5}
    template = templates.TOOL_TEMPLATES[name]
    with serving.serving(serving.source(template=template)) as served, served.http() as client:
        forced = client.post("/v1/chat/completions", json=asked | {"tool_choice": "required"})
        free = client.post("/v1/chat/completions", json=asked)
    assert (forced.status_code, free.status_code) == (400, 200)
    assert "'go' must be an object with `properties`" in forced.json()["error"]["message"]


TOOLS_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments.city }}"
    "{% endfor %}|{% endfor %}"
)


def rendered(template: str, messages: list[dict[str, Any]], *tools: Any) -> str:
    info = serving.source(template=template).info
    renderer = ChatTemplate(info.tokenizer)
    text = renderer.rendered(normal_messages(messages), tools)
    ids = renderer.tokenize(text)
    return str(info.tokenizer.decode(ids))


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
    assert text.startswith(json.dumps([TOOL])[:20])
    assert "assistant:time Rome|tool:noon|" in text


def test_templates_that_do_not_are_told_in_text() -> None:
    text = rendered(serving.CHATML, CONVERSATION, TOOL)
    assert text.startswith("<|start|>system\n")
    assert "Tells the time." in text
    assert f"<tool_call>\n{CALL}\n</tool_call>" in text
    assert "<tool_response>\nnoon\n</tool_response>" in text
    own = [{"role": "system", "content": "Be kind."}, *say("x")]
    assert rendered(serving.CHATML, own, TOOL).startswith("<|start|>system\nBe kind.\n\nYou can")
