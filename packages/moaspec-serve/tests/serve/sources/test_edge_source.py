"""The edge: the same answers with a target elsewhere, cut or not."""

from __future__ import annotations

import asyncio
import json
import math
import time
from pathlib import Path
from typing import Any, cast

import openai
import pytest

import edges
import serving
from edges import Edge
from moaspec_core.errors import BusyError
from moaspec_core.sampling.params import GREEDY, SamplingParams
from moaspec_edge.http.edge_source import EdgeLimits, _RunningJob
from moaspec_serve.guard import GuardSettings
from moaspec_serve.server_context import ServeSettings
from moaspec_serve.sources.source import Job, Places
from serving import LONGEST, MODEL, Served, own_text, say

pytestmark = pytest.mark.usefixtures("patient_link")

LONG = 60


def ask(served: Served, text: str = "hello", *, key: str = "none", **options: Any) -> Any:
    options = {"max_tokens": LONGEST, "temperature": 0, **options}
    client = served.openai(key)
    messages: Any = say(text)
    return client.chat.completions.create(model=MODEL, messages=messages, **options)


@pytest.mark.slow
def test_turns_go_on_in_the_session_that_holds_them(served_edge: Served) -> None:
    ask(served_edge, "one and two")
    assert ask(served_edge, "one and two").usage.prompt_tokens_details.cached_tokens > 10


def test_what_the_server_would_refuse_is_refused_here(served_edge: Served) -> None:
    """A request that can never succeed is the client's fault, and is not tried again."""
    schema = {"enum": [f"word {number}" for number in range(40_000)]}
    form = {"type": "json_schema", "json_schema": {"name": "words", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="at most 262144"):
        ask(served_edge, response_format=form)
    with pytest.raises(openai.BadRequestError, match="ask for fewer"):
        ask(served_edge, n=128)


def test_a_refusal_says_when_to_come_back() -> None:
    """By what texts took that have ended, and how much the present ones still have to write."""

    def retry_s(client: str, *jobs: tuple[str, int]) -> float:
        source = Edge(active=2).source
        places = Places("device", EdgeLimits(active=2, waiting=2), source._wait_s)
        for number, (owner, tokens) in enumerate(jobs):
            job = Job(prompt_ids=(1,), max_new_tokens=tokens, client=owner, sampling=GREEDY)
            places.take(owner, 1)
            running = _RunningJob(job, lambda _: None, time.monotonic() if number < 2 else None)
            source._running[cast("Any", number)] = running
        source._token_s.add(0.5)
        with pytest.raises(BusyError) as refused:
            places.take(client, 1 if len(jobs) > 2 else 2)
        assert f"Try again in {math.ceil(refused.value.retry_s)} s" in str(refused.value)
        return refused.value.retry_s

    assert retry_s("c", ("a", 80), ("b", 40), ("a", 60), ("b", 20)) == 20.0  # the first one ends
    assert retry_s("a", ("a", 80), ("a", 40)) == 40.0  # both texts of the key must
    assert retry_s("a", ("a", 1), ("a", 1)) == 1.0


def read_through_a_cut(edge: Edge, served: Served, **extension: Any) -> list[dict[str, Any]]:
    """Chunks of a stream that is cut after some verdicts and mended soon after."""
    body = {
        "model": MODEL,
        "messages": say("cut"),
        "max_tokens": LONG,
        "temperature": 0.9,
        "seed": 3,
        "stream": True,
        "moaspec": extension,
    }
    with (
        edge.cut_for_a_while(),
        served.http() as http,
        http.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def content(chunks: list[dict[str, Any]]) -> str:
    deltas = [one["delta"].get("content", "") for chunk in chunks for one in chunk["choices"]]
    return "".join(deltas)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_an_unmodified_client_gets_plain_text_through_a_cut(
    edge: Edge, served_edge: Served, *, stream: bool
) -> None:
    asked: dict[str, Any] = {"temperature": 0.9, "seed": 3, "max_tokens": LONG}
    with edge.cut_for_a_while():
        answer = ask(served_edge, "cut", stream=stream, **asked)
        chunks = list(answer) if stream else [answer]
    assert not any(hasattr(chunk, "moaspec") for chunk in chunks)
    said = [one.delta if stream else one.message for chunk in chunks for one in chunk.choices]
    assert "".join(one.content or "" for one in said) == own_text(
        "cut", LONG, temperature=0.9, seed=3
    )


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_nothing_is_kept_where_a_schema_must_hold() -> None:
    """The device does not know what the schema allows, so its text waits for the server."""
    schema = {"enum": ["a" * 30 + "b", "a" * 30 + "c"]}
    form = {"type": "json_schema", "json_schema": {"name": "letters", "schema": schema}}
    edge = Edge(on_cut="keep")
    with serving.serving(edge.source) as served, edge.cut_for_a_while(after=5, written=0):
        answer = ask(served, max_tokens=LONG, response_format=form)
    assert json.loads(answer.choices[0].message.content) in schema["enum"]
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.slow
def test_plain_decoding_is_the_servers_own() -> None:
    plain: dict[str, Any] = {"extra_body": {"moaspec": {"speculation": False}}}
    sampled: dict[str, Any] = {"temperature": 0.9, "seed": 5}
    with edges.over_websockets() as source, serving.serving(source) as served:
        drafted = ask(served, **sampled)
        alone = ask(served, n=2, stop="never said", **sampled, **plain)
        measured = ask(served, logprobs=True, **sampled, **plain)
    for answer in (drafted, alone, measured):
        assert answer.choices[0].message.content == own_text("hello", **sampled)
    assert alone.choices[1].message.content != alone.choices[0].message.content
    # The server alone tells no log-probabilities, so who asks for them has drafts all the same.
    assert all(token.logprob < 0 for token in measured.choices[0].logprobs.content)
    for answer, drafts in ((drafted, True), (alone, False), (measured, True)):
        speculation = answer.usage.speculation
        assert bool(speculation["drafted"]) is drafts
    assert alone.usage.speculation["tau"] == 1.0


@pytest.mark.slow
def test_a_refusal_ends_one_request_only() -> None:
    edge = Edge()
    edge.link.refuse_next = True
    with serving.serving(edge.source) as served:
        with pytest.raises(openai.InternalServerError, match="full"):
            ask(served)
        assert ask(served).choices[0].message.content == own_text("hello")


@pytest.mark.slow
def test_nothing_is_shared_between_keys() -> None:
    edge = Edge(active=1)
    settings = ServeSettings(guarded=GuardSettings(api_keys=("one", "two")))
    with serving.serving(edge.source, settings) as served:
        cached = []
        for key in ("one", "two", "two"):
            usage = ask(served, key=key).usage
            cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached[:2] == [0, 0]
    assert cached[2] > 0


@pytest.mark.slow
def test_stored_prompts_are_not_shared_between_keys_either(tmp_path: Path) -> None:
    edge = Edge(prefix_dir=tmp_path)
    settings = ServeSettings(guarded=GuardSettings(api_keys=("one", "two")))
    with serving.serving(edge.source, settings) as served:
        for key in ("one", "two", "two"):
            ask(served, key=key)
    assert len(list(tmp_path.iterdir())) == 2


def test_link_can_be_cut_over_http(edge: Edge, served_edge: Served) -> None:
    with served_edge.http() as http:
        assert http.get("/v1/moaspec").json()["mode"] == "edge"
        assert http.post("/v1/moaspec/link", json={"cut": True}).status_code == 200
        assert edge.link.cut
        link = http.post("/v1/moaspec/link", json={"cut": False}).json()
        assert link["can_cut"]
        assert "moaspec_link_bytes_sent" in http.get("/metrics").text
        assert not edge.link.cut


def test_a_tenants_sessions_do_not_push_out_anothers() -> None:
    """Whoever has no session takes one of the tenant who has most."""

    async def run() -> None:
        source = Edge(active=3).source
        for tenant in ("alice", "mallory", "mallory"):
            source._new_session(tenant).tenant = tenant
        job = Job(prompt_ids=(1,), max_new_tokens=1, sampling=SamplingParams(), tenant="bob")
        _, evicted = source._take_session(job)
        assert evicted is source._sessions[1]
        await source.close()

    asyncio.run(run())


@pytest.mark.slow
def test_an_edge_may_be_closed_twice_at_once() -> None:
    """When answers outlast a shutdown's grace, the server closes the edge, and the app as well."""

    async def run() -> None:
        source = Edge().source
        await source.start()
        job = Job(prompt_ids=(1, 2, 3), max_new_tokens=2, sampling=SamplingParams())
        source.submit([job], lambda *_: None)
        await asyncio.gather(*source._running)
        (pooled,) = source._sessions
        first, second = (asyncio.create_task(source.close()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()  # the server's own, once the app has ended
        await second
        await source.close()
        assert not source._sessions
        assert pooled.session.stats.state == "closed"
        assert source.link is not None
        assert source.link.bytes_sent > 0

    asyncio.run(run())
