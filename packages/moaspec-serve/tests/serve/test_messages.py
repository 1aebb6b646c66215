"""Messages over HTTP: parts, developers, template variables, and messages to be continued."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import serving
import templates
from serving import MODEL, Served, say

VARIABLES = (
    "{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}"
    "{{ [budget, style, flag, marks] | tojson }}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


@pytest.fixture(scope="module")
def variables() -> Iterator[Served]:
    with serving.serving(serving.source(template=VARIABLES)) as served:
        yield served


def prompt_tokens(served: Served, messages: Any, **options: Any) -> int:
    body = {"model": MODEL, "messages": messages, "max_tokens": 1, **options}
    with served.http() as http:
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens"])


@pytest.mark.parametrize("value", [1, 0.5, None, False, [1, "two"], {"a": None}, "text"])
def test_variables_of_the_template_are_any_json(variables: Served, value: Any) -> None:
    """Tokens are bytes here, so their number shows what was rendered."""
    given = {"budget": value, "style": "x", "flag": True, "marks": []}
    length = len("user:q\n" + json.dumps([value, "x", True, []]) + "assistant:")
    assert prompt_tokens(variables, say("q"), chat_template_kwargs=given) == length
    with variables.http() as http:
        body = {"model": MODEL, "input": "q", "max_output_tokens": 1}
        answer = http.post("/v1/responses", json={**body, "chat_template_kwargs": given})
    assert answer.json()["usage"]["input_tokens"] == length


def test_parts_and_developers(served: Served) -> None:
    whole = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "one two"}]
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    split = [
        {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": parts},
    ]
    assert prompt_tokens(served, whole) == prompt_tokens(served, split)


def test_a_message_is_continued(served: Served) -> None:
    messages = [*say("q"), {"role": "assistant", "content": "It is"}]
    begun = prompt_tokens(served, messages)
    without = prompt_tokens(served, messages, add_generation_prompt=False)
    assert begun - without == len("<|start|>assistant\n") - len("<|start|>") + 1
    continued = prompt_tokens(served, messages, continue_final_message=True)
    assert without - continued == len("\n") + 1  # and the mark that ends a message
    with served.http() as http:
        answer = http.post(
            "/v1/chat/completions",
            json={
                "model": MODEL,
                "messages": messages,
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
        )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "continue_final_message"


@pytest.mark.parametrize(
    ("field", "value"), [("images", ["aGk="]), ("prefix", True), ("partial", True)]
)
def test_fields_of_other_servers_are_not_ignored(served: Served, field: str, value: Any) -> None:
    asked = {"role": "assistant", "content": "It is"}
    with served.http() as http:
        body = {"model": MODEL, "messages": [*say("q"), asked | {field: value}], "max_tokens": 1}
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert field in error["param"]
    assert "not supported" in error["message"]
    without = prompt_tokens(served, [*say("q"), asked])
    assert prompt_tokens(served, [*say("q"), asked | {field: type(value)()}]) == without


def test_a_conversation_that_a_template_refuses() -> None:
    with serving.serving(serving.source(template=templates.GEMMA3)) as served:
        with served.http() as http:
            answer = http.post(
                "/v1/chat/completions", json={"model": MODEL, "messages": [*say("a"), *say("b")]}
            )
        assert answer.status_code == 400
        assert "(user, user): roles must alternate" in answer.json()["error"]["message"]
