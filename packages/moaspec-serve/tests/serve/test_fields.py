"""Every field of a request is used, refused, or harmless."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from typing import Any, get_args

import httpx
import pytest
from openai.types import Completion
from openai.types import completion_create_params as completions
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat import completion_create_params as chat
from openai.types.responses import Response, ResponseIncludable, ResponseStreamEvent
from openai.types.responses import response_create_params as responses
from pydantic import TypeAdapter

import serving
import templates
import tiny
from moaspec_serve.openai.chat_schema import ChatRequest
from moaspec_serve.openai.responses.responses_schema import INCLUDABLE, ResponseRequest
from moaspec_serve.openai.schema import CompletionRequest
from moaspec_serve.server_context import MAX_COMPARED, NEUTRAL
from moaspec_serve.sources.local_source import LocalSource
from serving import MODEL, Served, say

HARMLESS = {
    *("background", "background_options", "metadata", "prediction", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "service_tier"),
    *("max_tool_calls", "store", "stream_options", "user", "access_programs"),
}
"""Documented as ignored."""
ENDPOINTS: dict[str, tuple[Any, type, dict[str, Any]]] = {
    "/v1/chat/completions": (
        chat.CompletionCreateParamsBase,
        ChatRequest,
        {"messages": say("Hi."), "max_tokens": 2},
    ),
    "/v1/completions": (
        completions.CompletionCreateParamsBase,
        CompletionRequest,
        {"prompt": "Hi.", "max_tokens": 2},
    ),
    "/v1/responses": (
        responses.ResponseCreateParamsBase,
        ResponseRequest,
        {"input": "Hi.", "max_output_tokens": 2},
    ),
}

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {}}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving.serving(serving.source(template=templates.QWEN25)) as running:
        yield running


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with served.http() as client:
        yield client


def post(http: httpx.Client, path: str, **fields: Any) -> httpx.Response:
    return http.post(path, json={"model": MODEL, **ENDPOINTS[path][2], **fields})


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_field_of_openai_is_known(path: str) -> None:
    given, ours, _ = ENDPOINTS[path]
    assert set(given.__annotations__) - set(ours.model_fields) - set(NEUTRAL) <= HARMLESS  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ENDPOINTS)
def test_harmless_fields_are_ignored(http: httpx.Client, path: str) -> None:
    given = dict.fromkeys(HARMLESS - {"store", "stream_options"}, "x")
    assert post(http, path, **given, store=False, unheard_of=1).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("path", ENDPOINTS)
def test_fields_that_would_change_the_answer_are_refused(http: httpx.Client, path: str) -> None:
    for name in NEUTRAL.keys() - ENDPOINTS[path][1].model_fields.keys():  # type: ignore[attr-defined]
        answer = post(http, path, **{name: "?"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        for value in (None, *NEUTRAL[name]):
            assert post(http, path, **{name: value}).status_code == 200, (name, value)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_unknown_fields_of_our_own_object_are_refused(http: httpx.Client, path: str) -> None:
    answer = post(http, path, moaspec={"speculatoin": False})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "moaspec.speculatoin")


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    ("name", "meant"),
    [("temprature", "temperature"), ("topP", "top_p"), ("streams", "stream"), ("Seed", "seed")],
)
def test_misspelt_fields_are_refused(http: httpx.Client, path: str, name: str, meant: str) -> None:
    answer = post(http, path, **{name: None})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name
    assert repr(meant) in answer.json()["error"]["message"]


def test_not_all_of_many_unknown_fields_are_compared(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other requests wait meanwhile."""
    compared: list[str] = []

    def compare(name: str, *_: Any) -> list[str]:
        compared.append(name)
        return []

    monkeypatch.setattr(difflib, "get_close_matches", compare)
    fields: dict[str, Any] = {f"unheard_of_{i}": i for i in range(10_000)} | {"x" * 10**6: 1}
    assert post(http, "/v1/completions", **fields).status_code == 200
    assert len(compared) == MAX_COMPARED


@pytest.mark.parametrize("prompt", [[-1], [[3, -1]]])
def test_errors_name_the_kind_of_prompt_that_was_meant(http: httpx.Client, prompt: Any) -> None:
    answer = post(http, "/v1/completions", prompt=prompt)
    assert answer.status_code == 400
    assert "greater than or equal to 0" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"tools": 2 * [TOOL]}, "tools"),
        ("/v1/chat/completions", {"functions": 2 * [TOOL["function"]]}, "tools"),
        ("/v1/responses", {"tools": 2 * [{"type": "function", **TOOL["function"]}]}, "tools"),
        ("/v1/chat/completions", {"reasoning_effort": "low"}, "reasoning_effort"),
        ("/v1/responses", {"reasoning": {"effort": "low"}}, "reasoning_effort"),
        ("/v1/responses", {"text": {"verbosity": "low"}}, "text.verbosity"),
        ("/v1/responses", {"include": ["message.output_text.logprobs"]}, "include.0"),
        ("/v1/responses", {"include": ["reasoning.encrypted_content", "x"]}, "include.1"),
        ("/v1/responses", {"truncation": "x"}, "truncation"),
        ("/v1/responses", {"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ("/v1/chat/completions", {"tools": [{"type": "custom", "custom": {}}]}, "tools.0.type"),
        ("/v1/chat/completions", {"functions": [], "tools": []}, "functions"),
        ("/v1/chat/completions", {"function_call": {"name": "x"}}, "tool_choice"),
    ],
)
def test_values_that_are_refused(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = post(http, path, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_documented_values_that_change_nothing(http: httpx.Client) -> None:
    documented = set(get_args(ResponseIncludable)) - {"message.output_text.logprobs"}
    assert documented == INCLUDABLE
    for way in ("auto", "disabled", None):
        answer = post(http, "/v1/responses", include=sorted(INCLUDABLE), truncation=way)
        assert answer.status_code == 200


@pytest.mark.parametrize("prompt", [["a"] * 200, [[3]] * 200], ids=["texts", "ids"])
def test_too_many_prompts_are_told_by_their_limit(http: httpx.Client, prompt: Any) -> None:
    error = post(http, "/v1/completions", prompt=prompt).json()["error"]
    assert error["param"] == "prompt"
    assert "it holds 200 prompts; at most 64 are taken" in error["message"]
    assert post(http, "/v1/completions", prompt=[3] * 200).status_code == 200


LISTS: dict[str, Any] = {"name": "look", "parameters": {"type": "array"}}
PASSWORD: dict[str, Any] = {
    "type": "object",
    "properties": {"secret": {"type": "string", "format": "password", "maxLength": 2}},
    "required": ["secret"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"tools": [{"type": "function", "function": LISTS}]}),
        ("/v1/chat/completions", {"functions": [LISTS]}),
        ("/v1/responses", {"tools": [{"type": "function", **LISTS}]}),
    ],
    ids=["tools", "functions", "responses"],
)
def test_arguments_of_tools_are_objects(
    http: httpx.Client, path: str, fields: dict[str, Any]
) -> None:
    error = post(http, path, **fields).json()["error"]
    assert error["param"] == "tools"
    assert "'look'" in error["message"]
    assert "'array'" in error["message"]


def test_formats_of_strings_that_grammars_do_not_know(http: httpx.Client) -> None:
    """They are notes; in a tool a number that cannot be read is named with the tool."""
    path = "/v1/chat/completions"
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": PASSWORD}}
    answer = post(http, path, response_format=schema, max_tokens=60).json()["choices"][0]
    assert set(json.loads(answer["message"]["content"])) == {"secret"}
    tool: dict[str, Any] = {"name": "look", "parameters": PASSWORD}
    asked = {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
    answer = post(http, path, **asked).json()
    assert "error" not in answer
    tool["parameters"] = {"type": "object", "properties": {"a": {"const": 10**40}}}
    error = post(http, path, **asked).json()["error"]
    assert error["message"].startswith("Tool 'look': The JSON schema cannot be used: the integer 1")


def test_reasoning_effort_is_a_variable_of_templates_that_read_it() -> None:
    template = "{{ reasoning_effort | default('medium') }}" + serving.CHATML
    with serving.serving(serving.source(template=template)) as running, running.http() as http:
        for value in ("low", "the highest"):
            fields: dict[str, Any]
            for path, fields in (
                ("/v1/chat/completions", {"reasoning_effort": value}),
                ("/v1/responses", {"reasoning": {"effort": value, "summary": "auto"}}),
            ):
                usage = post(http, path, **fields).json()["usage"]
                plain = post(http, path).json()["usage"]
                count = usage.get("prompt_tokens", usage.get("input_tokens"))
                less = plain.get("prompt_tokens", plain.get("input_tokens"))
                assert count - less == len(value) - len("medium")


FUNCTION = {
    "name": "time",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.mark.slow
def test_functions_in_the_older_form(http: httpx.Client) -> None:
    path = "/v1/chat/completions"
    older = {"functions": [FUNCTION], "function_call": {"name": "time"}, "max_tokens": 200}
    answer = post(http, path, **older).json()["choices"][0]
    call = {"name": "time", "arguments": '{"city": "Rome"}'}
    assert answer["finish_reason"] == "function_call"
    message = {"role": "assistant", "content": None, "refusal": None}
    assert answer["message"] == {**message, "function_call": call}
    lines = post(http, path, **older, stream=True).text.splitlines()
    chunks = [json.loads(one[6:])["choices"][0] for one in lines if one.startswith("data: {")]
    assert [c["delta"]["function_call"] for c in chunks if "function_call" in c["delta"]] == [call]
    assert chunks[-1]["finish_reason"] == "function_call"


def test_conversations_in_the_older_form_are_those_of_the_newer_one(http: httpx.Client) -> None:
    path = "/v1/chat/completions"
    call = {"name": "time", "arguments": '{"city": "Rome"}'}
    older = [
        *say("time?"),
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "time", "content": "noon"},
    ]
    newer = [
        *say("time?"),
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "a", "content": "noon"},
    ]
    tools = [{"type": "function", "function": FUNCTION}]
    first = post(http, path, messages=older, functions=[FUNCTION], function_call="none", seed=1)
    second = post(http, path, messages=newer, tools=tools, tool_choice="none", seed=1)
    answers = [one.json() for one in (first, second)]
    contents = [one["choices"][0]["message"]["content"] for one in answers]
    assert contents[0] == contents[1]
    counts = [one["usage"]["prompt_tokens"] for one in answers]
    assert counts[0] == counts[1]


def test_what_an_assistant_refused_or_thought_is_kept(http: httpx.Client) -> None:
    path = "/v1/chat/completions"

    def tokens(**message: Any) -> int:
        messages = [*say("a"), {"role": "assistant", **message}, *say("b")]
        count: int = post(http, path, messages=messages).json()["usage"]["prompt_tokens"]
        return count

    assert tokens(refusal="I will not.", content=None) == tokens(content="I will not.")
    told = {"role": "assistant", "content": "b", "reasoning": "Hm."}
    asked = ChatRequest.model_validate({"model": MODEL, "messages": [told]})
    (message,) = asked.conversation()
    assert message == {"role": "assistant", "content": "b", "reasoning_content": "Hm."}


TOOLS = [{"type": "function", "function": FUNCTION}]
SHAPES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {},
        {"n": 2, "logprobs": True, "top_logprobs": 2},
        {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200},
        {"response_format": {"type": "json_object"}},
    ],
    "/v1/completions": [{}, {"n": 2, "logprobs": 2}, {"echo": True}],
    "/v1/responses": [
        {},
        {"instructions": "Be brief."},
        {
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": "required",
            "max_output_tokens": 200,
        },
    ],
}
NULLABLE = {
    "chat.completion": ("usage", "system_fingerprint"),
    "choices": ("logprobs",),
    "message": ("content", "refusal"),
    "response": ("error", "incomplete_details", "instructions", "metadata", "temperature", "top_p"),
}
"""Fields that OpenAI's specification requires and that may be null: the types tell them not from
optional ones."""


def check_nullable(value: Any, kind: str = "") -> None:
    """Assert that all required fields are there, in an answer and all within."""
    if isinstance(value, list):
        for one in value:
            check_nullable(one, kind)
    if isinstance(value, dict):
        for name in (kind, value.get("object")):
            assert set(NULLABLE.get(str(name), ())) <= value.keys()
        for name, part in value.items():
            check_nullable(part, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "whole", "event"),
    [
        ("/v1/chat/completions", ChatCompletion, ChatCompletionChunk),
        ("/v1/completions", Completion, None),
        ("/v1/responses", Response, ResponseStreamEvent),
    ],
)
def test_answers_have_all_that_the_clients_types_require(
    http: httpx.Client, path: str, whole: Any, event: Any
) -> None:
    for fields in SHAPES[path]:
        answer = post(http, path, **fields).json()
        TypeAdapter(whole).validate_python(answer)
        check_nullable(answer)
        lines = post(http, path, **fields, stream=True).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert events
        for one in events:
            if event:
                TypeAdapter(event).validate_python(one)
            check_nullable(one)
    assert "moaspec" not in answer


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_all_chunks_have_usage_if_one_is_asked_for(http: httpx.Client, path: str) -> None:
    for asked in (True, False):
        options = {"include_usage": asked}
        lines = post(http, path, stream=True, stream_options=options).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert {"usage" in chunk for chunk in chunks} == {asked}
        assert all(chunk.get("usage") is None for chunk in chunks[:-1])
        assert (chunks[-1].get("usage") is not None) is asked


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_token_ids_as_vllm_returns_them(http: httpx.Client, path: str) -> None:
    """Of the prompt and of each choice, the end included; a stream's are the same in parts."""
    prompts = ["Hi.", "Ho"]
    fields: dict[str, Any] = {"return_token_ids": True, "n": 2, "max_tokens": 20, "seed": 3}
    fields |= {"prompt": prompts} if path == "/v1/completions" else {"logprobs": True}
    answer = post(http, path, **fields).json()
    lines = post(http, path, stream=True, **fields).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert not any("token_ids" in one for one in post(http, path).json()["choices"])
    for choice in answer["choices"]:
        ids = choice["token_ids"]
        assert serving.END in ids or len(ids) == 20
        parts = [c for one in chunks for c in one["choices"] if c["index"] == choice["index"]]
        assert [token for part in parts for token in part.get("token_ids", ())] == ids
        if path == "/v1/completions":
            prompt = serving.tokenizer()(prompts[choice["index"] // 2])["input_ids"]
            assert choice["prompt_token_ids"] == parts[0]["prompt_token_ids"] == prompt
    if path != "/v1/completions":
        assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
        told = [one for one in chunks if "prompt_token_ids" in one]
        assert [one["prompt_token_ids"] for one in told] == [answer["prompt_token_ids"]]


@pytest.mark.slow
def test_stored_responses_are_those_that_were_sent(http: httpx.Client) -> None:
    sent = post(http, "/v1/responses").json()
    assert http.get(f"/v1/responses/{sent['id']}").json() == sent


@pytest.mark.slow
def test_named_templates_without_a_default_are_refused() -> None:
    named: Any = {"rag": serving.CHATML}
    of = tiny.fresh_target(
        tokenizer=serving.tokenizer(named),
        vocab_size=serving.VOCAB,
        max_position_embeddings=serving.CONTEXT,
        eos_token_id=serving.END,
    )
    with serving.serving(LocalSource(of, name=MODEL)) as running, running.http() as http:
        for path, status in (
            ("/v1/chat/completions", 400),
            ("/v1/responses", 400),
            ("/v1/completions", 200),
        ):
            answer = post(http, path)
            assert answer.status_code == status
            assert status == 200 or "none named 'default'" in answer.json()["error"]["message"]
