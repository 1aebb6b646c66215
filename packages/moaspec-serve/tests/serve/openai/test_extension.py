"""Who proposed a token, what was provisional and what was taken back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx

import serving
from moaspec_core.engine.request_state import Event
from moaspec_serve.openai.extension import ExtensionWriter
from moaspec_serve.openai.schema import Extension
from moaspec_serve.openai.token_counts import TokenCounts
from moaspec_serve.sources.source import LinkState, Update
from moaspec_serve.sources.text_writer import TextWriter
from serving import LONGEST, MODEL, Served, own_text, say

ALL = {"sources": True, "tree": True, "stats": True}


def stream(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All events of a stream."""
    asked = {"model": MODEL, "stream": True, "temperature": 0, **body}
    with http.stream("POST", path, json=asked) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_streams_say_where_tokens_come_from(served: Served) -> None:
    bodies = {
        "/v1/chat/completions": {"messages": say("hello"), "max_tokens": LONGEST},
        "/v1/completions": {"prompt": "hello", "max_tokens": LONGEST},
        "/v1/responses": {"input": "hello", "max_output_tokens": LONGEST},
    }
    with served.http() as http:
        for path, body in bodies.items():
            events = stream(http, path, {**body, "moaspec": ALL})
            said = [event["moaspec"] for event in events if "moaspec" in event]
            assert all(one["choice"] == 0 for one in said)
            pieces = [piece for one in said for piece in one.get("pieces", [])]
            assert len(pieces) == LONGEST
            assert {piece["source"] for piece in pieces} <= {"draft", "copy", "target"}
            rounds = [one["round"] for one in said if "round" in one]
            assert [one["number"] for one in rounds] == list(range(1, len(rounds) + 1))
            assert sum(one["emitted"] for one in rounds) == LONGEST - 1
            accepted = [node for one in rounds for node in one["nodes"] if node["accepted"]]
            own = [piece for piece in pieces if piece["source"] != "target"]
            # The last round may accept more than the limit has room for.
            assert [(one["id"], one["source"]) for one in accepted][: len(own)] == [
                (one["id"], one["source"]) for one in own
            ]
            stats = said[-1]["stats"]
            assert stats["tau"] == (LONGEST - 1) / len(rounds)
            assert stats["drafted"] > 0


def test_pieces_joined_are_the_text(served: Served) -> None:
    with served.http() as http:
        body = {"messages": say("hello"), "max_tokens": LONGEST, "moaspec": ALL}
        for event in stream(http, "/v1/chat/completions", body):
            text = event["choices"][0]["delta"].get("content", "")
            pieces = event.get("moaspec", {}).get("pieces", [])
            assert "".join(piece["text"] for piece in pieces) == text
        asked = {"model": MODEL, "temperature": 0, **body}
        answer = http.post("/v1/chat/completions", json=asked).json()
    (said,) = answer["moaspec"]["choices"]
    assert "".join(piece["text"] for piece in said["pieces"]) == own_text("hello")
    assert said["stats"]["tokens"] == LONGEST


def test_plain_decoding_on_request(served: Served) -> None:
    body = {"messages": say("hello"), "max_tokens": LONGEST, "model": MODEL, "temperature": 0}
    with served.http() as http:
        asked = {**body, "moaspec": {"speculation": False}}
        answer = http.post("/v1/chat/completions", json=asked).json()
    assert answer["usage"]["speculation"]["drafted"] == 0
    assert answer["usage"]["speculation"]["tau"] == 1.0
    assert answer["choices"][0]["message"]["content"] == own_text("hello")


def reports(asked: Extension, updates: Sequence[Update]) -> list[dict[str, Any]]:
    """What a stream would say, update by update."""
    info = serving.source().info
    reporter, counts = ExtensionWriter(0, asked, info), TokenCounts()
    writer = TextWriter(info.tokenizer)
    link = LinkState(state="up", bytes_sent=3)
    said = []
    for update in updates:
        counts.add(update)
        said.append(reporter.chunk(update, writer.take(update), counts, link) or {})
    return said


def ids(text: str) -> tuple[int, ...]:
    return tuple(serving.tokenizer()(text)["input_ids"])


def test_corrections_say_what_is_gone() -> None:
    updates = [
        Update(token_ids=ids("a"), sources=("target",)),
        Update(provisional=ids("bcd")),
        Update(provisional=ids("bcdef")),
        Update(token_ids=ids("bX"), sources=("draft", "target"), round=Event(0, ids("bX"), ())),
        Update(token_ids=ids("Y"), sources=("target",), stop_reason="max_new_tokens"),
    ]
    said = reports(Extension(sources=True, provisional=True, link=True), updates)
    assert "provisional" not in said[0]
    assert said[0]["link"]["bytes_sent"] == 3
    assert "".join(one["text"] for one in said[2]["provisional"]) == "bcdef"
    assert said[3]["provisional"] == []
    assert said[3]["correction"] == {"confirmed": 1, "removed": 4, "text": "cdef"}
    assert [one.get("was") for one in said[3]["pieces"]] == ["provisional", "corrected"]
    assert "correction" not in said[4]


def test_what_was_right_is_no_correction() -> None:
    updates = [
        Update(provisional=ids("bc")),
        Update(token_ids=ids("bcd"), sources=("draft", "draft", "target")),
    ]
    said = reports(Extension(sources=True, provisional=True), updates)
    assert "correction" not in said[1]
    assert [one.get("was") for one in said[1]["pieces"]] == ["provisional", "provisional", None]


def test_who_did_not_ask_sees_nothing_provisional() -> None:
    updates = [Update(provisional=ids("bc")), Update(token_ids=ids("x"), sources=("target",))]
    assert reports(Extension(), updates) == [{}, {}]
