"""Scripted sessions of well-known clients with `serve` and `edge`; skipped where one is missing.

LiteLLM and LangChain are found as packages. The Vercel AI SDK (`npm install ai zod @ai-sdk/openai
@ai-sdk/openai-compatible`) is found in the directory that $MOASPEC_NODE names.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import serving
import templates
from edges import Edge
from links import patient_link
from serving import MODEL, Served, say

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # those of the clients
]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TIME: dict[str, Any] = {
    "type": "function",
    "function": {"name": "time", "description": "Tells it.", "parameters": PARAMETERS},
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}},
    "required": ["kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["serve", "edge"])
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    target = serving.target(templates.QWEN25)
    source: Any = (
        serving.source(template=templates.QWEN25)
        if request.param == "serve"
        else Edge(target).source
    )
    with patient_link(), serving.serving(source) as served:
        yield served


def test_litellm(server: Served) -> None:
    litellm = pytest.importorskip("litellm")
    asked: dict[str, Any] = {
        "model": f"openai/{MODEL}",
        "api_base": server.api,
        "api_key": "none",
        "temperature": 0,
    }
    whole = litellm.completion(messages=say("hello"), max_tokens=12, logprobs=True, **asked)
    assert len(whole.choices[0].logprobs.content) == 12
    chunks = litellm.completion(messages=say("hello"), max_tokens=12, stream=True, **asked)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    forced = {"tools": [TIME], "tool_choice": "required", "max_tokens": 200}
    messages = say("What time is it?")
    message = litellm.completion(messages=messages, parallel_tool_calls=False, **forced, **asked)
    messages.append(message.choices[0].message.model_dump(exclude_none=True))
    for call in message.choices[0].message.tool_calls:
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "noon"})
    answer = litellm.completion(messages=messages, tools=[TIME], max_tokens=6, **asked)
    assert answer.choices[0].message.role == "assistant"
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    answer = litellm.completion(messages=say("?"), response_format=form, max_tokens=60, **asked)
    assert json.loads(answer.choices[0].message.content)["kind"] in ("cat", "dog")


def test_langchain(server: Served) -> None:
    openai = pytest.importorskip("langchain_openai")
    messages = pytest.importorskip("langchain_core.messages")
    asked: dict[str, Any] = {
        "model": MODEL,
        "base_url": server.api,
        "api_key": "none",
        "temperature": 0,
    }
    model = openai.ChatOpenAI(max_tokens=12, **asked)
    whole = model.invoke("hello")
    assert "".join(str(chunk.content) for chunk in model.stream("hello")) == whole.content
    history: list[Any] = [messages.HumanMessage("What time is it?")]
    longer = openai.ChatOpenAI(max_tokens=200, **asked)
    bound = longer.bind_tools([TIME], tool_choice="time", parallel_tool_calls=False)
    called = bound.invoke(history)
    assert called.tool_calls[0]["args"]["city"] in ("Rome", "Oslo")
    streamed = None
    for chunk in bound.stream(history):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    assert streamed.tool_calls[0]["args"] == called.tool_calls[0]["args"]
    result = messages.ToolMessage("noon", tool_call_id=called.tool_calls[0]["id"])
    assert model.invoke([*history, called, result]).type == "ai"
    structured = longer.with_structured_output(SCHEMA | {"title": "animal"}, method="json_schema")
    assert structured.invoke("Which?")["kind"] in ("cat", "dog")


def test_vercel_ai_sdk(server: Served) -> None:
    directory, node = os.environ.get("MOASPEC_NODE"), shutil.which("node")
    if directory is None or node is None:
        pytest.skip("needs node, and $MOASPEC_NODE with the AI SDK")
    script = (Path(__file__).parent / "ai_sdk.mjs").read_text()
    done = subprocess.run(
        [node, "--input-type=module", "-", server.api, MODEL],
        input=script,
        capture_output=True,
        text=True,
        cwd=directory,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for said in json.loads(done.stdout.splitlines()[-1]).values():
        assert said["same"]
        assert said["results"] == said["streamed"]
        assert said["results"][0] in ("noon in Rome", "noon in Oslo")
        assert said["kind"] in ("cat", "dog")
        assert (said["steps"], said["tokens"]) == (2, 12)


OPEN_WEBUI: dict[str, Any] = {
    "stream": True,
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "User's name: A."},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    ],
    "temperature": 0,
    "max_tokens": 12,
    "stream_options": {"include_usage": True},
    "metadata": {"chat_id": "x"},
    "user": {"name": "A", "id": "1", "email": "a@b.c", "role": "admin"},
    "files": None,
    "features": {"web_search": False},
    "session_id": "x",
    "chat_id": "y",
    "id": "z",
    "background_tasks": {"title_generation": True},
    "params": {},
    "tool_ids": None,
    "variables": {"{{USER_NAME}}": "A"},
    "keep_alive": None,
    "num_ctx": 2048,
    "top_k": 20,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "stop": [],
}
"""What it sends for a chat, with settings that only its own back ends read."""


def test_open_webui(server: Served) -> None:
    with server.http() as http:
        assert http.get("/v1/models").json()["data"][0]["id"] == MODEL
        with http.stream("POST", "/v1/chat/completions", json=OPEN_WEBUI) as answer:
            assert answer.status_code == 200, answer.read()
            events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["usage"]["completion_tokens"] == 12
        title = {**OPEN_WEBUI, "stream": False, "max_completion_tokens": 12}
        del title["stream_options"], title["max_tokens"]
        assert http.post("/v1/chat/completions", json=title).status_code == 200
        tools = {**OPEN_WEBUI, "tools": [TIME], "tool_choice": "required", "max_tokens": 200}
        with http.stream("POST", "/v1/chat/completions", json=tools) as answer:
            assert answer.status_code == 200, answer.read()
            chunks = [json.loads(x[6:]) for x in answer.iter_lines() if x.startswith("data: {")]
        calls = [
            c
            for chunk in chunks
            for i in chunk["choices"]
            for c in i["delta"].get("tool_calls", ())
        ]
        assert json.loads(calls[0]["function"]["arguments"])["city"] in ("Rome", "Oslo")
