"""Prompts are tokenised in few threads, in turn, and only while somebody waits."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

import serving
from hostile_grammars import EXPENSIVE
from moaspec_core.chat.chat_template import ChatTemplate
from moaspec_core.errors import BusyError
from moaspec_core.support import limits
from moaspec_serve.preparation import PreparationPool
from serving import CONTEXT, MODEL, Served, say


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_long_texts_are_refused_before_they_are_tokenised(
    served: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokenize(*_: Any, **__: Any) -> Any:
        raise AssertionError("tokenised")

    text = "x" * (CONTEXT * served.source.info.longest_token + 1)
    monkeypatch.setattr(ChatTemplate, "tokenize", tokenize)
    monkeypatch.setattr(type(served.source.info.tokenizer), "__call__", tokenize)
    said: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": say(text)},
        "completions": {"prompt": text},
    }
    with served.http() as http:
        body = {"model": MODEL, **said.get(path, {"input": text})}
        answer = http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_one_client_does_not_hold_up_another() -> None:
    hold = threading.Event()

    async def run() -> None:
        preparation = PreparationPool()
        greedy = [asyncio.create_task(preparation.in_turn("a", hold.wait)) for _ in range(8)]
        try:
            await asyncio.sleep(0)
            assert await asyncio.wait_for(preparation.in_turn("b", lambda: 7), 60) == 7
        finally:
            hold.set()
        await asyncio.gather(*greedy)

    asyncio.run(run())


def test_a_client_that_waits_too_often_is_refused() -> None:
    hold = threading.Event()

    async def run() -> None:
        preparation = PreparationPool()
        number = limits.MAX_PREPARING_WAITING
        tasks = [asyncio.create_task(preparation.in_turn("a", hold.wait)) for _ in range(number)]
        try:
            while preparation._waiting["a"] < number:
                await asyncio.sleep(0)
            with pytest.raises(BusyError, match="Try again in 1 s") as refused:
                await preparation.in_turn("a", hold.wait)
            assert refused.value.retry_s == 1.0  # nothing was prepared that would say how long
            preparation._mean_s.add(30.0)
            with pytest.raises(BusyError, match=r"--max-waiting .*Try again in 30 s"):
                await preparation.in_turn("a", hold.wait)
        finally:
            hold.set()
        await asyncio.gather(*tasks)
        assert await preparation.in_turn("a", lambda: 1) == 1
        assert not preparation._waiting

    asyncio.run(run())


@pytest.mark.slow
def test_as_many_requests_wait_as_the_server_takes() -> None:
    """Also while their prompts are read; the others are told which options set the number."""
    places, more = 100, 40
    body = {"model": serving.MODEL, "prompt": "x" * 500, "max_tokens": 2}

    async def ask(url: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=300, limits=UNLIMITED) as http:
            return await asyncio.gather(
                *(http.post("/v1/completions", json=body) for _ in range(places + more))
            )

    with serving.serving(serving.source(active=2, waiting=places - 2)) as served:
        answers = asyncio.run(ask(served.url))
    codes = [answer.status_code for answer in answers]
    assert set(codes) <= {200, 429}
    assert codes.count(200) >= places
    for answer in answers:
        if answer.status_code == 429:
            assert "--max-waiting" in answer.json()["error"]["message"]
            assert int(answer.headers["retry-after"]) > 0


@pytest.mark.slow
def test_an_expensive_schema_holds_up_nobody(served: Served) -> None:
    """Neither new requests of the same client, nor streams, nor other answers."""
    schema = {"type": "json_schema", "json_schema": {"schema": EXPENSIVE}}
    body: dict[str, Any] = {"model": MODEL, "messages": say("Go on."), "max_tokens": 24}
    with served.http() as http, ThreadPoolExecutor(1) as pool:
        path = "/v1/chat/completions"
        expensive = pool.submit(http.post, path, json={**body, "response_format": schema})
        for _ in range(2):
            assert http.get("/health").status_code == 200
            events = http.post(path, json={**body, "stream": True}).text
            assert events.endswith("data: [DONE]\n\n")
        assert not expensive.done()
        refused = expensive.result()
    assert refused.status_code == 400
    assert "too much time or memory" in refused.json()["error"]["message"]


def test_a_schema_without_end_is_refused_by_its_reference(endpoint: Served) -> None:
    node = {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}, "required": ["x"]}
    schema = {"$defs": {"n": node}, "$ref": "#/$defs/n"}
    tool = {"type": "function", "function": {"name": "go", "parameters": schema}}
    forms: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        {"tools": [tool], "tool_choice": "required"},
    ]
    with endpoint.http() as http:
        for form in forms:
            body = {"model": MODEL, "messages": say("Go on."), **form}
            answer = http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 400
            assert "without end (by the reference '#/$defs/n')" in answer.json()["error"]["message"]


UNLIMITED = httpx.Limits(max_connections=None)


def test_work_of_clients_that_left_is_given_up() -> None:
    begun: list[int] = []
    hold = threading.Event()

    async def run() -> None:
        preparation = PreparationPool()
        first = asyncio.create_task(preparation.in_turn("a", hold.wait))
        left = [
            asyncio.create_task(preparation.in_turn("a", partial(begun.append, i)))
            for i in range(3)
        ]
        await asyncio.sleep(0)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        hold.set()
        await first
        assert await preparation.in_turn("a", lambda: 1) == 1

    asyncio.run(run())
    assert begun == []
