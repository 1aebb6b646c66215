"""JSON by schema: valid every time, and the same with and without speculation."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from serving import MODEL, Served, say

NUM = 50
SHORT = {"type": "string", "maxLength": 6, "pattern": "^[a-z ]*$"}
SCHEMAS: list[dict[str, Any]] = [
    {"enum": ["red", "green", {"other": None}]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": -9, "maximum": 99}, "s": SHORT},
        "required": ["n"],
        "additionalProperties": False,
    },
    {
        "anyOf": [{"type": "null"}, {"$ref": "#/$defs/pair"}],
        "$defs": {
            "pair": {
                "type": "array",
                "prefixItems": [SHORT, {"const": 1}],
                "minItems": 2,
                "items": False,
            }
        },
    },
]


def allowed(schema: dict[str, Any], value: Any) -> bool:
    """What each of the schemas means, in Python."""
    number = SCHEMAS.index(schema)
    if number == 0:
        return value in schema["enum"]
    if number == 1:
        return 1 <= len(value) <= 4 and all(isinstance(one, bool) for one in value)
    if number == 2:
        return set(value) <= {"n", "s"} and -9 <= value["n"] <= 99 and len(value.get("s", "")) <= 6
    return value is None or (len(value) == 2 and len(value[0]) <= 6 and value[1] == 1)


async def answers(served: Served, *, speculation: bool) -> list[dict[str, Any]]:
    """All of them at once."""

    async def one(http: httpx.AsyncClient, number: int) -> dict[str, Any]:
        schema = {"name": "it", "schema": SCHEMAS[number % len(SCHEMAS)]}
        body = {
            "model": MODEL,
            "messages": say(f"question {number}"),
            "temperature": 0 if number % 3 == 0 else 1.0,
            "seed": number,
            "max_tokens": 80,
            "response_format": {"type": "json_schema", "json_schema": schema},
            "moaspec": {"speculation": speculation},
        }
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async with httpx.AsyncClient(base_url=served.url, timeout=300) as http:
        return await asyncio.gather(*(one(http, number) for number in range(NUM)))


@pytest.fixture(scope="module")
def found(served: Served) -> list[dict[str, Any]]:
    return asyncio.run(answers(served, speculation=True))


def content(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


@pytest.mark.slow
def test_every_answer_is_valid(found: list[dict[str, Any]]) -> None:
    for number, answer in enumerate(found):
        assert answer["choices"][0]["finish_reason"] == "stop"
        value = json.loads(content(answer))
        assert allowed(SCHEMAS[number % len(SCHEMAS)], value), value


@pytest.mark.slow
def test_equal_without_speculation(served: Served, found: list[dict[str, Any]]) -> None:
    plain = asyncio.run(answers(served, speculation=False))
    assert [content(one) for one in plain] == [content(one) for one in found]
    speculation = [one["usage"]["speculation"] for one in found]
    assert sum(one["drafted"] for one in speculation) > NUM
    assert all(one["usage"]["speculation"]["drafted"] == 0 for one in plain)


def test_json_objects(served: Served) -> None:
    schema_free = {"type": "json_object"}
    with served.http() as http:
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": say("x"),
            "response_format": schema_free,
        }
        body |= {"max_tokens": 40, "seed": 3}
        answer = http.post("/v1/chat/completions", json=body).json()
    assert content(answer).startswith("{")
