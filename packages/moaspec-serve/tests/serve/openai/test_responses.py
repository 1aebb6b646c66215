"""/v1/responses with the official client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import OpenAI

import serving
from serving import LONGEST, MODEL, Served, own_text

SAMPLED: dict[str, Any] = {"temperature": 0.9, "extra_body": {"seed": 5}}
TOOL: Any = {
    "type": "function",
    "name": "time",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def ask(client: OpenAI, asked: Any = "hello", **options: Any) -> Any:
    options = {"max_output_tokens": LONGEST, **SAMPLED, **options}
    return client.responses.create(model=MODEL, input=asked, **options)


def expected(text: str = "hello") -> str:
    return own_text(text, temperature=0.9, seed=5)


@pytest.mark.slow
def test_answer_and_stream_are_the_targets_own(client: OpenAI) -> None:
    answer = ask(client)
    assert answer.output_text == expected()
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == LONGEST
    events = list(ask(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    text = "".join(one.delta for one in events if one.type == "response.output_text.delta")
    assert text == expected()
    assert events[-1].response.output_text == expected()


@pytest.mark.slow
def test_conversations_go_on_from_what_was_kept(client: OpenAI) -> None:
    first = ask(client)
    second = ask(client, "and then?", previous_response_id=first.id)
    whole = ask(
        client,
        [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": [{"type": "output_text", "text": expected()}]},
            {"role": "user", "content": [{"type": "input_text", "text": "and then?"}]},
        ],
        store=False,
    )
    assert second.output_text == whole.output_text
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    for name in (first.id, whole.id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(name)


@pytest.mark.slow
def test_instructions_are_the_system_message(client: OpenAI) -> None:
    told = ask(client, instructions="Be brief.")
    as_message = ask(
        client, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    )
    assert told.output_text == as_message.output_text != expected()


def test_json_schema(client: OpenAI) -> None:
    schema = {"enum": [{"a": 1}, {"a": 2}]}
    form: Any = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    answer = ask(client, text=form)
    assert json.loads(answer.output_text)["a"] in (1, 2)
    assert answer.status == "completed"
    assert answer.text.format.schema_ == schema


@pytest.mark.slow
def test_calls_and_their_results(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "time"},
        "parallel_tool_calls": False,
        "max_output_tokens": 200,
    }
    first = ask(client, **asked)
    (call,) = first.output
    assert (call.type, call.name) == ("function_call", "time")
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    events = list(ask(client, stream=True, **asked))
    (done,) = [one for one in events if one.type == "response.function_call_arguments.done"]
    assert done.arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    later = ask(client, [result], previous_response_id=first.id)
    explicit = ask(client, [{"role": "user", "content": "hello"}, call.model_dump(), result])
    assert later.output_text == explicit.output_text


@pytest.mark.slow
def test_tenants_do_not_see_one_another() -> None:
    from moaspec_serve.guard import GuardSettings
    from moaspec_serve.server_context import ServeSettings

    settings = ServeSettings(guarded=GuardSettings(api_keys=("one", "two")))
    with serving.serving(serving.source(), settings) as served:
        kept = ask(served.openai("one"))
        assert served.openai("one").responses.retrieve(kept.id).id == kept.id
        with pytest.raises(openai.NotFoundError):
            served.openai("two").responses.retrieve(kept.id)
        with pytest.raises(openai.AuthenticationError) as refused:
            ask(served.openai("three"))
        assert refused.value.code == "invalid_api_key"


def test_the_oldest_responses_go(served: Served) -> None:
    from moaspec_serve.http_errors import RequestError
    from moaspec_serve.openai.responses.response_store import ResponseStore

    store = ResponseStore(2)
    with served.http() as http:
        body = {"model": MODEL, "input": "x", "max_output_tokens": 1}
        made = [http.post("/v1/responses", json=body).json() for _ in range(3)]
    for one in made:
        store.add("me", one, [])
    with pytest.raises(RequestError):
        store.find("me", made[0]["id"])
    assert json.loads(store.find("me", made[2]["id"]).response)["id"] == made[2]["id"]


def stored(name: str, text: str = "") -> dict[str, Any]:
    """A response that holds some text."""
    return {"id": name, "object": "response", "instructions": text, "output": []}


@pytest.mark.parametrize(("number", "num_bytes"), [(8, 1 << 30), (256, 8 * 1400)])
def test_a_tenant_who_stores_much_loses_nothing_of_others(number: int, num_bytes: int) -> None:
    from moaspec_serve.http_errors import RequestError
    from moaspec_serve.openai.responses.response_store import ResponseStore

    store = ResponseStore(number, num_bytes)
    store.add("alice", stored("a"), serving.say("hello"))
    for i in range(50):
        store.add("mallory", stored(f"m{i}", "x" * 1000), [])
        assert len(store._stored) <= number
        assert sum(one.size for one in store._stored.values()) <= num_bytes
    assert store.find("alice", "a").messages == serving.say("hello")
    assert store.find("mallory", "m49").messages == []
    with pytest.raises(RequestError):
        store.find("mallory", "m0")
    store.add("mallory", stored("all", "x" * num_bytes if number > 8 else ""), [])
    assert store.find("alice", "a")
