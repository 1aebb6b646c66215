"""Request, call, result, answer: on templates with the demands of well-known models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

import serving
import templates
from edges import Edge
from links import patient_link
from serving import MODEL, say

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "</tool_call>]"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "time", "description": "Tells it.", "parameters": PARAMETERS}
SHORT, LONG = 6, 150
"""Tokens of an answer, and more than a call has."""

ONE: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 4}
EDGES = ("llama31", "phi4-mini", "gemma3")
"""Further templates that `edge` is tried with; the code above the two sources is the same."""


@pytest.fixture(
    scope="module",
    params=[
        *(f"serve {name}" for name in templates.TOOL_TEMPLATES),
        "edge mistral-v3",
        *(pytest.param(f"edge {name}", marks=pytest.mark.slow) for name in EDGES),
    ],
)
def client(request: pytest.FixtureRequest) -> Iterator[OpenAI]:
    kind, _, name = request.param.partition(" ")
    template = templates.TOOL_TEMPLATES[name]
    source: Any = (
        serving.source(template=template)
        if kind == "serve"
        else Edge(serving.target(template)).source
    )
    with patient_link(), serving.serving(source) as served:
        yield served.openai()


def chat(client: OpenAI, messages: Any, **options: Any) -> Any:
    tools: Any = [{"type": "function", "function": FUNCTION}]
    limit = SHORT if options["tool_choice"] == "none" else LONG
    return client.chat.completions.create(
        model=MODEL, messages=messages, tools=tools, max_tokens=limit, **SAMPLED, **options
    )


@pytest.mark.slow
def test_a_chat(client: OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "Be kind."}, *say("What time is it?")]
    answer = chat(client, messages, **ONE).choices[0]
    assert answer.finish_reason == "tool_calls"
    calls = answer.message.tool_calls
    chunks = list(chat(client, messages, **ONE, stream=True))
    streamed = [one for c in chunks for i in c.choices for one in i.delta.tool_calls or ()]
    assert [one.function for one in streamed] == [
        type(one.function)(**call.function.model_dump())
        for one, call in zip(streamed, calls, strict=True)
    ]
    messages.append(answer.message.model_dump(exclude_none=True))
    for call in calls:
        assert (
            json.loads(call.function.arguments)["city"] in PARAMETERS["properties"]["city"]["enum"]
        )
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "noon"})
    later = chat(client, messages, tool_choice="none").choices[0].message
    chunks = list(chat(client, messages, tool_choice="none", stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == later.content
    messages += [{"role": "assistant", "content": later.content}, *say("Thanks.")]
    assert chat(client, messages, tool_choice="none").choices[0].message.role == "assistant"


def respond(client: OpenAI, asked: Any, **options: Any) -> Any:
    tools: Any = [{"type": "function", **FUNCTION}]
    limit = SHORT if options["tool_choice"] == "none" else LONG
    return client.responses.create(
        model=MODEL,
        input=asked,
        tools=tools,
        max_output_tokens=limit,
        temperature=0.9,
        extra_body={"seed": 4},
        **options,
    )


@pytest.mark.slow
def test_responses(client: OpenAI) -> None:
    first = respond(client, "What time is it?", **ONE, instructions="Be kind.")
    calls = [item for item in first.output if item.type == "function_call"]
    events = list(
        respond(
            client,
            "What time is it?",
            **ONE,
            instructions="Be kind.",
            stream=True,
        )
    )
    done = [one for one in events if one.type == "response.function_call_arguments.done"]
    assert [one.arguments for one in done] == [call.arguments for call in calls]
    assert calls
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
        for call in calls
    ]
    later = respond(client, results, tool_choice="none", previous_response_id=first.id)
    whole = [*say("What time is it?"), *(one.model_dump() for one in calls), *results]
    assert respond(client, whole, tool_choice="none").output_text == later.output_text
    events = list(
        respond(client, results, tool_choice="none", previous_response_id=first.id, stream=True)
    )
    assert events[-1].response.output_text == later.output_text
    assert respond(client, "Thanks.", previous_response_id=later.id, tool_choice="none").output


@pytest.mark.slow
@pytest.mark.parametrize(("name", "several"), [("llama31", False), ("qwen25", True)])
def test_several_calls_are_the_default_where_the_template_takes_them(
    name: str, several: bool
) -> None:
    template = templates.TOOL_TEMPLATES[name]
    with serving.serving(serving.source(template=template)) as served:
        client = served.openai()
        answer = respond(client, "What time is it?", tool_choice="required")
        calls = [item for item in answer.output if item.type == "function_call"]
        assert answer.parallel_tool_calls is several
        assert several or len(calls) == 1
        asked = respond(client, "x", tool_choice="none", parallel_tool_calls=not several)
        assert asked.parallel_tool_calls is not several
