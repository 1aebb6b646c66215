"""Many at once: all finish, none waits long for others, each text is what it is alone."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

import moaspec
import serving
from serving import MODEL, Served

NUM = 64
NEW = 16


@dataclass
class Text:
    """What one client saw."""

    ids: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    """Where in the order of all clients' chunks its own came."""


def prompt(number: int) -> list[int]:
    """Prompts of many lengths."""
    return [(7 * number + i) % 256 for i in range(1 + number % 23)]


def settings(number: int) -> dict[str, Any]:
    """Greedy and sampled rows in one batch."""
    return {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}


async def read(http: httpx.AsyncClient, number: int, clock: list[int]) -> Text:
    body = {
        "model": MODEL,
        "prompt": prompt(number),
        "max_tokens": NEW,
        "stream": True,
        "moaspec": {"sources": True},
        **settings(number),
    }
    text = Text()
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                clock[0] += 1
                text.places.append(clock[0])
                said = json.loads(line[6:])["moaspec"]
                text.ids += [piece["id"] for piece in said.get("pieces", [])]
    return text


async def read_all(served: Served, num: int) -> list[Text]:
    limits = httpx.Limits(max_connections=num)
    async with httpx.AsyncClient(base_url=served.url, timeout=300, limits=limits) as http:
        clock = [0]
        return await asyncio.gather(*(read(http, number, clock) for number in range(num)))


@pytest.fixture(scope="module")
def texts(served: Served) -> list[Text]:
    return asyncio.run(read_all(served, NUM))


def test_each_text_is_what_it_is_alone(texts: list[Text]) -> None:
    of = serving.target()
    for number, text in enumerate(texts):
        alone = moaspec.generate(of, prompt(number), max_new_tokens=NEW, **settings(number))
        assert text.ids == alone.token_ids, number


def test_nobody_waits_for_others_to_finish(texts: list[Text]) -> None:
    """All are decoded in one batch, so that they begin, and end, within the others' time."""
    last_first = max(text.places[0] for text in texts)
    full = [text.places[-1] for text in texts if len(text.ids) == NEW]
    assert last_first < min(full)
    assert max(full) <= 2 * min(full)


def test_cancelled_ones_free_their_rows() -> None:
    source = serving.source(parked=0)
    with serving.serving(source) as served:
        asyncio.run(read_all(served, 8))
        held = source.cache.num_bytes

        async def leave() -> None:
            async with httpx.AsyncClient(base_url=served.url, timeout=300) as http:
                body = {"model": MODEL, "prompt": [1], "max_tokens": 150, "stream": True, "n": 8}
                async with http.stream("POST", "/v1/completions", json=body) as answer:
                    await anext(answer.aiter_lines())

        for _ in range(3):
            asyncio.run(leave())
            for _ in range(1000):
                if source.load.active == 0:
                    break
                asyncio.run(asyncio.sleep(0.02))
            assert source.engine.num_active == 0
        asyncio.run(read_all(served, 8))
        assert source.cache.num_bytes == held


def test_what_does_not_fit_waits() -> None:
    """With room for two rows at a time all are served, in the order they came."""
    one_row = serving.source().cache.slot_bytes * 64
    with serving.serving(serving.source(cache_bytes=2 * one_row, parked=1)) as served:
        texts = asyncio.run(read_all(served, 6))
    of = serving.target()
    for number, text in enumerate(texts):
        alone = moaspec.generate(of, prompt(number), max_new_tokens=NEW, **settings(number))
        assert text.ids == alone.token_ids


def test_what_can_never_fit_is_refused() -> None:
    one_row = serving.source().cache.slot_bytes * 64
    with serving.serving(serving.source(cache_bytes=one_row)) as served, served.http() as http:
        body = {"model": MODEL, "prompt": [1], "max_tokens": 64}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 400
        assert "cache" in answer.json()["error"]["message"]
