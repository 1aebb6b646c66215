"""Bodies of very many JSON values are refused before they are parsed; errors stay few."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from moaspec_core.support import limits
from moaspec_serve.guard import too_many_json_values
from moaspec_serve.openai.chat_schema import ChatRequest
from moaspec_serve.openai.responses.responses_schema import ResponseRequest
from moaspec_serve.openai.schema import CompletionRequest
from serving import MODEL, say

MOST = 100
LIMIT = limits.MAX_JSON_VALUES
BASE = {"model": MODEL, "max_tokens": 1}


@pytest.fixture(autouse=True)
def _few_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_JSON_VALUES", MOST)


@pytest.mark.parametrize(
    "body",
    [
        [0] * (MOST + 1),
        [[]] * MOST,
        [{}] * MOST,
        {str(i): i for i in range(MOST + 1)},
        ['a"]', "\\", '\\"'] * MOST,
    ],
)
def test_too_many_values(body: Any) -> None:
    assert too_many_json_values(json.dumps(body).encode())
    assert too_many_json_values(json.dumps(body, separators=(",", ":")).encode("utf-16"))


@pytest.mark.parametrize("body", [[[]] * 25, [{}] * 25, {str(i): i for i in range(25)}])
def test_lists_objects_and_members_count_for_several(body: Any) -> None:
    assert too_many_json_values(json.dumps(body).encode())
    assert not too_many_json_values(json.dumps([0] * len(body)).encode())


@pytest.mark.parametrize("length", [4000, limits.MAX_MESSAGES])
def test_the_longest_chat_is_taken(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_JSON_VALUES", LIMIT)
    part = {"type": "text", "text": 'with "quotes", [brackets] and {braces: all of them}'}
    body = {**BASE, "messages": [{"role": "user", "content": [part]}] * length}
    assert not too_many_json_values(json.dumps(body).encode())


@pytest.mark.parametrize(
    "text", [",[{" * MOST, 'a\\",' * MOST, "\\" * 7 + ",", '"' * 7 + "," * 200]
)
def test_texts_are_one_value(text: str) -> None:
    assert not too_many_json_values(json.dumps({"a": [text, text], "b": 1}).encode())


BAD: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "parts": (ChatRequest, {"messages": [{"role": "user", "content": [1] * 1000}]}),
    "calls": (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [1] * 128}]}),
    "bias": (ChatRequest, {"messages": say("x"), "logit_bias": {f"x{i}": 1 for i in range(9999)}}),
    "stop": (ChatRequest, {"messages": say("x"), "stop": [1] * 64}),
    "ids": (CompletionRequest, {"prompt": [-1] * 9999}),
    "prompts": (CompletionRequest, {"prompt": [[-1] * 999] * 64}),
    "input": (ResponseRequest, {"input": [{"role": "user", "content": [1] * 1000}]}),
}


@pytest.mark.parametrize("name", BAD)
def test_a_list_brings_one_error(name: str) -> None:
    schema, body = BAD[name]
    with pytest.raises(ValidationError) as refused:
        schema.model_validate({**BASE, **body})
    assert refused.value.error_count() < 20
