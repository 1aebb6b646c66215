"""The edge: the same answers with a target elsewhere, cut or not."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import serving
import tiny
from moaspec.errors import LinkError
from moaspec.remote import (
    Connection,
    InProcessTransport,
    LinkOptions,
    LocalDevice,
    RemoteOptions,
    TargetService,
)
from moaspec.serve.edge import EdgeSource
from moaspec.serve.source import Load
from serving import LONGEST, MODEL, Served, own_text, say

LONG = 60
PATIENT = LinkOptions(heartbeat_s=1.0, dead_after_s=30.0, backoff_s=0.05, max_backoff_s=0.1)
"""A busy machine must not look like a dead link; cuts here are noticed at once."""


class CutTransport:
    """A transport that is cut after some frames of verdicts, until somebody mends it."""

    def __init__(self, inner: InProcessTransport) -> None:
        self._inner, self.cut = inner, False
        self.cut_after: int | None = None

    async def connect(self) -> Connection:
        if self.cut:
            raise LinkError("cut")
        return _CutConnection(await self._inner.connect(), self)


class _CutConnection:
    def __init__(self, inner: Connection, through: CutTransport) -> None:
        self._inner, self._through = inner, through

    async def send(self, frame: bytes) -> None:
        if self._through.cut:
            raise LinkError("cut")
        await self._inner.send(frame)

    async def receive(self) -> bytes:
        frame, through = await self._inner.receive(), self._through
        if through.cut_after is not None:
            through.cut_after -= 1
            if through.cut_after < 0:
                through.cut, through.cut_after = True, None
        if through.cut:
            raise LinkError("cut")
        return frame

    async def close(self) -> None:
        await self._inner.close()


class Edge:
    """A served edge whose link can be cut."""

    def __init__(self, **options: Any) -> None:
        target = serving.target()
        drafter = tiny.random_drafter(target)
        self.link = CutTransport(InProcessTransport(TargetService(target, drafter)))
        self.source = EdgeSource(
            LocalDevice(target, drafter),
            self.link,
            name=MODEL,
            options=RemoteOptions(link=PATIENT, draft="chain:2", **options),
            faults=self.link,
        )


@pytest.fixture(scope="module")
def edge() -> Edge:
    return Edge()


@pytest.fixture(scope="module")
def served_edge(edge: Edge) -> Iterator[Served]:
    with serving.serving(edge.source) as running:
        yield running


def ask(served: Served, text: str = "hello", **options: Any) -> Any:
    options = {"max_tokens": LONGEST, "temperature": 0, **options}
    client = served.openai()
    messages: Any = say(text)
    return client.chat.completions.create(model=MODEL, messages=messages, **options)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 5}])
def test_answers_are_the_targets_own(served_edge: Served, options: dict[str, Any]) -> None:
    answer = ask(served_edge, n=2, **options)
    assert answer.choices[0].message.content == own_text("hello", **options)
    chunks = list(ask(served_edge, stream=True, **options))
    text = "".join(one.delta.content or "" for chunk in chunks for one in chunk.choices)
    assert text == own_text("hello", **options)


def test_stop_strings(served_edge: Served) -> None:
    whole = own_text("hello", temperature=0.9, seed=5)
    answer = ask(served_edge, stop=whole[5:8], temperature=0.9, seed=5)
    assert answer.choices[0].message.content == whole[: whole.find(whole[5:8])]
    assert answer.choices[0].finish_reason == "stop"


def test_turns_go_on_in_the_session_that_holds_them(served_edge: Served) -> None:
    ask(served_edge, "one and two")
    assert ask(served_edge, "one and two").usage.prompt_tokens_details.cached_tokens > 10


def read_through_a_cut(edge: Edge, served: Served, **extension: Any) -> list[dict[str, Any]]:
    """Chunks of a stream that is cut after some verdicts and mended soon after."""
    body = {
        "model": MODEL,
        "messages": say("cut"),
        "max_tokens": LONG,
        "temperature": 0.9,
        "seed": 3,
        "stream": True,
        **({"moaspec": extension} if extension else {}),
    }

    def mend() -> None:
        edge.link.cut = False

    edge.link.cut_after = 12
    timer = threading.Timer(1.5, mend)
    timer.start()
    with served.http() as http, http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    timer.join()
    assert edge.link.cut_after is None, "the link was never cut"
    return [json.loads(line) for line in lines]


def content(chunks: list[dict[str, Any]]) -> str:
    deltas = [one["delta"].get("content", "") for chunk in chunks for one in chunk["choices"]]
    return "".join(deltas)


def test_an_unmodified_client_gets_plain_text_through_a_cut(
    edge: Edge, served_edge: Served
) -> None:
    chunks = read_through_a_cut(edge, served_edge)
    assert content(chunks) == own_text("cut", LONG, temperature=0.9, seed=3)
    assert not any("moaspec" in chunk for chunk in chunks)


def test_who_asks_sees_what_is_provisional_and_what_is_taken_back(
    edge: Edge, served_edge: Served
) -> None:
    chunks = read_through_a_cut(edge, served_edge, sources=True, provisional=True, link=True)
    assert content(chunks) == own_text("cut", LONG, temperature=0.9, seed=3)
    said = [chunk["moaspec"] for chunk in chunks if "moaspec" in chunk]
    shown = [one["provisional"] for one in said if one.get("provisional")]
    assert shown
    assert {one["link"]["state"] for one in said} >= {"up", "down"}
    # The drafter is random, so what it wrote alone was wrong.
    (correction,) = [one["correction"] for one in said if "correction" in one]
    assert correction["removed"] > 0
    assert correction["confirmed"] + correction["removed"] == len(shown[-1])
    assert any(piece.get("was") == "corrected" for one in said for piece in one.get("pieces", ()))


def test_kept_text_says_so() -> None:
    edge = Edge(on_cut="keep")
    with serving.serving(edge.source) as served:
        chunks = read_through_a_cut(edge, served, sources=True)
    pieces = [p for c in chunks if "moaspec" in c for p in c["moaspec"].get("pieces", ())]
    assert len(pieces) == LONG
    assert "device" in {piece["source"] for piece in pieces}
    before = [piece["text"] for piece in pieces]
    assert own_text("cut", LONG, temperature=0.9, seed=3).startswith(
        "".join(before[: [p["source"] for p in pieces].index("device")]).rstrip("\ufffd")
    )


def test_json_schema_and_forced_calls(served_edge: Served) -> None:
    schema: Any = {"name": "it", "schema": {"enum": [{"a": "rome"}, {"a": "oslo"}]}}
    form = {"type": "json_schema", "json_schema": schema}
    asked: dict[str, Any] = {"temperature": 0.9, "seed": 4, "max_tokens": 200}
    answer = ask(served_edge, response_format=form, **asked)
    assert json.loads(answer.choices[0].message.content) in schema["schema"]["enum"]
    tool: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    tool["function"]["parameters"] |= {"properties": {}, "additionalProperties": False}
    called = ask(served_edge, tools=[tool], tool_choice="required", **asked)
    assert called.choices[0].message.tool_calls[0].function.name == "now"


def test_link_can_be_cut_over_http(edge: Edge, served_edge: Served) -> None:
    with served_edge.http() as http:
        assert http.get("/v1/moaspec").json()["mode"] == "edge"
        assert http.post("/v1/moaspec/link", json={"cut": True}).status_code == 200
        assert edge.link.cut
        link = http.post("/v1/moaspec/link", json={"cut": False}).json()
        assert link["can_cut"]
        assert not edge.link.cut


def test_leaving_frees_the_session(served_edge: Served) -> None:
    stream = ask(served_edge, stream=True, max_tokens=1500)
    next(iter(stream))
    assert served_edge.source.load != Load()
    stream.close()
    for _ in range(2000):
        if served_edge.source.load == Load():
            break
        asyncio.run(asyncio.sleep(0.02))
    assert served_edge.source.load == Load()
