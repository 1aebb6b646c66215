"""Many at once: all finish, none waits long for others, each text is what it is alone."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

import hybrid_models
import moaspec
import serving
from moaspec.target.generic.generic_target import target_of
from moaspec_core.drafting.ngram_proposer import TOKEN_BYTES
from moaspec_core.engine.request_state import Event
from moaspec_serve.sources.engine_worker import EngineWorker, WorkerLimits
from moaspec_serve.sources.local_source import LocalSource
from serving import MODEL, Served

NUM = 64
NEW = 16


@dataclass(frozen=True)
class Batch:
    """The ids that each client read, and the engine's events in their order."""

    texts: list[list[int]]
    events: list[Event]


def prompt(number: int) -> list[int]:
    """Prompts of many lengths."""
    return [(7 * number + i) % 256 for i in range(1 + number % 23)]


def settings(number: int) -> dict[str, Any]:
    """Greedy and sampled rows in one batch."""
    return {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}


async def read(http: httpx.AsyncClient, number: int) -> list[int]:
    body = {
        "model": MODEL,
        "prompt": prompt(number),
        "max_tokens": NEW,
        "stream": True,
        "moaspec": {"sources": True},
        **settings(number),
    }
    ids: list[int] = []
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                said = json.loads(line[6:])["moaspec"]
                ids += [piece["id"] for piece in said.get("pieces", [])]
    return ids


async def read_all(served: Served, num: int) -> list[list[int]]:
    limits = httpx.Limits(max_connections=num)
    async with httpx.AsyncClient(base_url=served.url, timeout=300, limits=limits) as http:
        return await asyncio.gather(*(read(http, number) for number in range(num)))


async def read_together(served: Served, worker: EngineWorker) -> list[list[int]]:
    """The engine begins when all requests are there, however long clients take to connect."""
    all_there = threading.Event()
    worker._inbox.put(lambda: None if all_there.wait(300) else pytest.fail("some never came"))
    reading = asyncio.create_task(read_all(served, NUM))
    while served.source.load.waiting < NUM and not reading.done():
        await asyncio.sleep(0.01)
    all_there.set()
    return await reading


@pytest.fixture(scope="module")
def batch(served: Served) -> Batch:
    worker: EngineWorker = served.source._worker  # type: ignore[attr-defined]
    events: list[Event] = []
    report = worker._report

    def note(event: Event) -> None:
        events.append(event)
        report(event)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "_report", note)
        texts = asyncio.run(read_together(served, worker))
    return Batch(texts, events)


@pytest.mark.slow
def test_each_text_is_what_it_is_alone(batch: Batch) -> None:
    of = serving.target()
    for number, ids in enumerate(batch.texts):
        alone = moaspec.generate(of, prompt(number), max_new_tokens=NEW, **settings(number))
        assert ids == alone.token_ids, number


@pytest.mark.slow
def test_nobody_waits_for_others_to_finish(batch: Batch) -> None:
    """All are decoded in one batch, so that they begin, and end, within the others' time."""
    places: dict[int, list[int]] = {}
    for place, event in enumerate(batch.events):
        places.setdefault(event.handle, []).extend([place] * len(event.token_ids))
    assert len(places) == NUM
    last_first = max(own[0] for own in places.values())
    full = [own[-1] for own in places.values() if len(own) == NEW]
    assert last_first < min(full)
    assert max(full) <= 2 * min(full)


@pytest.mark.slow
def test_cancelled_ones_free_their_rows() -> None:
    source = serving.source(parked=0)
    with serving.serving(source) as served:

        async def leave() -> None:
            async with httpx.AsyncClient(base_url=served.url, timeout=300) as http:
                body = {"model": MODEL, "prompt": [1], "max_tokens": 150, "stream": True, "n": 8}
                async with http.stream("POST", "/v1/completions", json=body) as answer:
                    await anext(answer.aiter_lines())

        held = set()
        for _ in range(3):
            asyncio.run(leave())
            while source.load.active:
                time.sleep(0.02)
            assert source.engine.num_active == 0
            asyncio.run(read_all(served, 8))
            held.add(source.cache.num_bytes)
        assert len(held) == 1, "rows of cancelled ones stay"


@pytest.mark.slow
def test_what_does_not_fit_waits() -> None:
    """With room for two rows at a time all are served, in the order they came."""
    one_row = serving.source().cache.slot_bytes * 64
    with serving.serving(serving.source(cache_bytes=2 * one_row, parked=1)) as served:
        texts = asyncio.run(read_all(served, 6))
    of = serving.target()
    for number, ids in enumerate(texts):
        alone = moaspec.generate(of, prompt(number), max_new_tokens=NEW, **settings(number))
        assert ids == alone.token_ids


def test_states_of_a_hybrid_take_room() -> None:
    model = hybrid_models.model("lfm2", vocab_size=serving.VOCAB)
    hybrid = target_of(model, serving.tokenizer(), name=MODEL)
    keys = 8 * (LocalSource(hybrid).cache.slot_bytes + TOKEN_BYTES)
    for size, status in ((keys, 400), (keys + hybrid.state_bytes, 200)):
        source = LocalSource(hybrid, name=MODEL, limits=WorkerLimits(cache_bytes=size))
        with serving.serving(source) as served, served.http() as http:
            body = {"model": MODEL, "prompt": [1], "max_tokens": 7}
            assert http.post("/v1/completions", json=body).status_code == status


def test_what_can_never_fit_is_refused() -> None:
    one_row = serving.source().cache.slot_bytes * 64
    with serving.serving(serving.source(cache_bytes=one_row)) as served, served.http() as http:
        body = {"model": MODEL, "prompt": [1], "max_tokens": 64}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 400
        assert "cache" in answer.json()["error"]["message"]
