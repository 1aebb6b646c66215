"""The official client, unchanged, with either endpoint: what it asks for is what it gets."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch
from openai import OpenAI

import moaspec
import serving
from hostile_grammars import wide
from moaspec_core.tokens.token_rules import TokenRules
from moaspec_serve.sources.source import Load
from serving import LONGEST, MODEL, Served, own_text, say

pytestmark = pytest.mark.essential

SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 5}


def chat(client: OpenAI, text: str = "hello", **options: Any) -> Any:
    options = {"max_completion_tokens": LONGEST, "temperature": 0, **options}
    messages: Any = say(text)
    return client.chat.completions.create(model=MODEL, messages=messages, **options)


def streamed(client: OpenAI, text: str = "hello", **options: Any) -> list[str]:
    """Texts of all choices, from a stream."""
    texts = [""] * options.get("n", 1)
    for chunk in chat(client, text, stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    return texts


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "moaspec"


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, SAMPLED, {**SAMPLED, "top_p": 0.7}])
def test_answers_are_the_targets_own(client: OpenAI, options: dict[str, Any]) -> None:
    answer = chat(client, **options)
    assert answer.choices[0].message.content == own_text("hello", **options)
    assert answer.choices[0].message.role == "assistant"
    assert streamed(client, **options) == [own_text("hello", **options)]


@pytest.mark.slow
def test_usage_counts_tokens_and_speculation(client: OpenAI) -> None:
    usage = chat(client, "usage").usage
    assert usage.completion_tokens == LONGEST
    assert usage.total_tokens == usage.prompt_tokens + LONGEST
    speculation = usage.speculation
    assert speculation["drafted"] > 0
    emitted = speculation["tau"] * speculation["rounds"]
    assert emitted == pytest.approx(LONGEST - 1)
    chunks = list(chat(client, "usage", stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == LONGEST
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0  # the row of the first answer


def test_nothing_of_the_extension_without_asking(client: OpenAI) -> None:
    assert not any(hasattr(chunk, "moaspec") for chunk in chat(client, stream=True))
    assert not hasattr(chat(client), "moaspec")


@pytest.mark.slow
def test_choices_have_noise_of_their_own(client: OpenAI) -> None:
    answer = chat(client, n=2, **SAMPLED)
    texts = [choice.message.content for choice in answer.choices]
    assert texts[0] == own_text("hello", **SAMPLED)
    assert texts[0] != texts[1]
    assert streamed(client, n=2, **SAMPLED) == texts


def test_stop_strings_end_the_text_and_are_no_part_of_it(client: OpenAI) -> None:
    whole = own_text("hello", **SAMPLED)
    stop = whole[5:8]
    answer = chat(client, stop=["never said", stop], **SAMPLED)
    assert answer.choices[0].message.content == whole[: whole.find(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert streamed(client, stop=stop, **SAMPLED) == [whole[: whole.find(stop)]]


def test_log_probabilities(client: OpenAI) -> None:
    answer = chat(client, logprobs=True)
    content = answer.choices[0].logprobs.content
    assert len(content) == LONGEST
    assert all(token.logprob <= 0 for token in content)
    chunks = list(chat(client, logprobs=True, stream=True))
    tokens = [one for c in chunks for i in c.choices if i.logprobs for one in i.logprobs.content]
    # Passes over other numbers of tokens round differently in their last bits.
    assert [one.logprob for one in tokens] == pytest.approx(
        [one.logprob for one in content], abs=1e-4
    )
    assert [one.token for one in tokens] == [one.token for one in content]


def test_alternatives(served: Served) -> None:
    answer = chat(served.openai(), logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == LONGEST
    for token in content:
        assert len(token.top_logprobs) == 3
        # Greedy: the chosen token is the most probable one.
        assert token.top_logprobs[0].token == token.token
        assert token.top_logprobs[0].logprob == token.logprob


def test_there_are_no_alternatives_at_the_edge(served_edge: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        chat(served_edge.openai(), logprobs=True, top_logprobs=3)


def test_completions(client: OpenAI) -> None:
    prompts = ["one", "two"]
    answer = client.completions.create(
        model=MODEL, prompt=prompts, max_tokens=LONGEST, n=2, logprobs=0, **SAMPLED
    )
    target, tokens = serving.target(), serving.tokenizer()
    ids = [tokens(prompt)["input_ids"] for prompt in prompts]
    results: Any = moaspec.generate(target, ids, max_new_tokens=LONGEST, num_choices=2, **SAMPLED)
    expected = [
        tokens.decode([t for t in one.token_ids if t != serving.END])
        for of in results
        for one in of
    ]
    assert [choice.text for choice in answer.choices] == expected
    logprobs: Any = answer.choices[0].logprobs
    assert len(logprobs.token_logprobs) == len(logprobs.tokens) == len(results[0][0].token_ids)
    assert logprobs.top_logprobs is None
    assert logprobs.text_offset[0] == 0
    by_id = client.completions.create(
        model=MODEL, prompt=ids[0], max_tokens=LONGEST, echo=True, **SAMPLED
    )
    assert by_id.choices[0].text == "one" + expected[0]


def test_alternatives_of_completions(served: Served) -> None:
    answer = served.openai().completions.create(
        model=MODEL, prompt="one", temperature=0, max_tokens=4, logprobs=2
    )
    logprobs: Any = answer.choices[0].logprobs
    for token, chosen, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        # Bytes that are parts of characters share one text.
        assert len(top) == (1 if set(top) == {"\ufffd"} else 2)
        assert max(top.values()) == top[token] == chosen


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(served: Served, stream: bool) -> None:
    """The prompt's numbers are transformers' own, as lm-eval's scored tasks need them."""
    target, ids = serving.target(), [[65, 66, 200, 67], [70, 71]]
    asked: dict[str, Any] = {"model": MODEL, "prompt": ids, "max_tokens": 1, "temperature": 0}
    asked |= {"echo": True, "logprobs": 1, "stream": stream}
    answer: Any = served.openai().completions.create(**asked)
    choices = [one for event in answer for one in event.choices] if stream else answer.choices
    for index, prompt in enumerate(ids):
        own = [one.logprobs for one in choices if one.index == index and one.logprobs]
        parts = [one.model_dump() for one in own]
        found = {
            name: [value for part in parts for value in part[name] or [None] * len(part["tokens"])]
            for name in ("tokens", "token_logprobs", "top_logprobs")
        }
        with torch.inference_mode():
            logits_TV = target.model(torch.tensor([prompt])).logits[0].float()
        log_p_TV = logits_TV.log_softmax(-1)
        expected = [float(log_p_TV[i, token]) for i, token in enumerate(prompt[1:])]
        assert len(found["tokens"]) == len(prompt) + 1
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        # Passes of other kernels add in another order.
        assert found["token_logprobs"][1:-1] == pytest.approx(expected, abs=1e-4)
        for i, tops in enumerate(found["top_logprobs"][1:-1]):
            assert max(tops.values()) == pytest.approx(float(log_p_TV[i].max()), abs=1e-4)
            assert found["token_logprobs"][1 + i] in tops.values()


def test_completions_stream(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "one", "temperature": 0}
    whole = client.completions.create(**asked)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 16  # OpenAI's default
    chunks = list(client.completions.create(stream=True, **asked))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_penalties_and_extras_reach_the_distribution(client: OpenAI) -> None:
    extras: dict[str, Any] = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.3}
    bias = {"97": -100.0}
    answer = chat(client, frequency_penalty=1.5, logit_bias=bias, extra_body=extras, **SAMPLED)
    expected = own_text(
        "hello", frequency_penalty=1.5, logit_bias={97: -100.0}, **extras, **SAMPLED
    )
    assert answer.choices[0].message.content == expected


def test_negative_seeds_are_seeds(client: OpenAI) -> None:
    answer = chat(client, temperature=0.9, seed=-1)
    expected = own_text("hello", temperature=0.9, seed=2**64 - 1)
    assert answer.choices[0].message.content == expected


EARLY = {str(serving.END): 100.0}
"""A bias with which a text ends as soon as it may."""


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, SAMPLED])
def test_a_text_has_its_least_tokens(client: OpenAI, options: dict[str, Any]) -> None:
    """The text is that of the library's own rule; the drafter of this server disagrees."""
    rules, bias = TokenRules(min_new_tokens=9), {serving.END: 100.0}
    extra = {"min_tokens": 9}
    answer = chat(client, logit_bias=EARLY, extra_body=extra, **options)
    assert answer.usage.completion_tokens == 10
    assert answer.choices[0].finish_reason == "stop"
    text = answer.choices[0].message.content
    assert text == own_text("hello", rules=rules, logit_bias=bias, **options)
    assert streamed(client, logit_bias=EARLY, extra_body=extra, **options) == [text]
    with pytest.raises(openai.BadRequestError, match="min_tokens is 99"):
        chat(client, extra_body={"min_tokens": 99})


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, SAMPLED])
def test_a_text_goes_on_behind_its_end(client: OpenAI, options: dict[str, Any]) -> None:
    bias = {serving.END: 8.0}  # it would end soon, and more than once
    asked: dict[str, Any] = {"logit_bias": {str(serving.END): 8.0}, **options}
    answer = chat(client, extra_body={"ignore_eos": True}, **asked)
    assert answer.usage.completion_tokens == LONGEST
    assert answer.choices[0].finish_reason == "length"
    expected = own_text("hello", logit_bias=bias, stop_token_ids=(), **options)
    assert answer.choices[0].message.content == expected
    form: Any = {"type": "json_object"}
    with pytest.raises(openai.BadRequestError, match="ignore_eos"):
        chat(client, extra_body={"ignore_eos": True}, response_format=form)


@pytest.mark.slow
def test_a_schema_ends_a_text_before_its_least_tokens(client: OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["ab"]}}}
    answer = chat(client, response_format=form, extra_body={"min_tokens": 20})
    assert answer.choices[0].message.content == '"ab"'


def test_leaving_a_stream_frees_its_place(client: OpenAI, endpoint: Served) -> None:
    stream = chat(client, stream=True, max_completion_tokens=1500)
    next(iter(stream))
    assert endpoint.source.load != Load()  # active, or about to be
    stream.close()
    for _ in range(2000):
        if endpoint.source.load == Load():
            break
        time.sleep(0.05)
    assert endpoint.source.load == Load()


def test_errors_are_openais(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        chat(client, temperature=9)
    assert bad.value.param == "temperature"
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as long:
        chat(client, "x" * serving.CONTEXT)
    assert long.value.code == "context_length_exceeded"
    limit = f"This model's maximum context length is {serving.CONTEXT} tokens. However, "
    assert limit in long.value.message
    schema = {"name": "bad", "schema": {"type": "no such type"}}
    with pytest.raises(openai.BadRequestError, match="schema"):
        chat(client, response_format={"type": "json_schema", "json_schema": schema})


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "name": {"type": "string", "maxLength": 8, "pattern": "^[a-z]*$"},
    },
    "required": ["kind", "age", "name"],
    "additionalProperties": False,
}


@pytest.mark.slow
def test_json_schema(client: OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
    answer = chat(client, response_format=form, max_completion_tokens=100, **SAMPLED)
    value = json.loads(answer.choices[0].message.content)
    assert value["kind"] in ("cat", "dog")
    assert 0 <= value["age"] <= 99
    assert answer.choices[0].finish_reason == "stop"
    text = "".join(streamed(client, response_format=form, max_completion_tokens=100, **SAMPLED))
    assert text == answer.choices[0].message.content


@pytest.mark.slow
def test_a_schema_that_cannot_be_followed_ends_its_own_request_only(client: OpenAI) -> None:
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "wide", "schema": wide(70, 80), "strict": True},
    }
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(chat, client, max_completion_tokens=200, **SAMPLED)
        with pytest.raises(openai.BadRequestError, match="schema or grammar simpler"):
            chat(client, response_format=form, **SAMPLED)
        chunks = chat(client, response_format=form, stream=True, **SAMPLED)
        said = (chunk.choices[0].delta.content for chunk in chunks)
        with pytest.raises(openai.APIError, match="schema or grammar simpler"):
            assert "".join(said) == "never whole"
    assert other.result().choices[0].message.content == own_text("hello", 200, **SAMPLED)


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Answers something.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"$ref": "#/$defs/city"}},
                "required": ["city"],
                "additionalProperties": False,
                "$defs": {"city": {"enum": ["Rome", "Oslo"]}},
            },
        },
    }
    for name in ("weather", "time")
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "time"}),
        ({"type": "function", "function": {"name": "time"}}, {"time"}),
    ],
)
def test_forced_tool_calls(client: OpenAI, choice: Any, names: set[str]) -> None:
    asked = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    answer = chat(client, max_completion_tokens=200, **asked, **SAMPLED)
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.function.name in names
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    assert answer.choices[0].message.content is None
    chunks = list(chat(client, max_completion_tokens=200, stream=True, **asked, **SAMPLED))
    calls = [one for c in chunks for i in c.choices for one in i.delta.tool_calls or ()]
    assert [one.function.arguments for one in calls] == [call.function.arguments]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_results_of_tools_are_part_of_the_conversation(client: OpenAI) -> None:
    function = {"name": "time", "arguments": '{"city": "Rome"}'}
    messages: Any = [
        *say("what time is it?"),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=4
    )
    usage = answer.usage
    assert usage is not None
    prompt = len(serving.tokenizer()("".join(str(one["content"]) for one in messages))["input_ids"])
    assert usage.prompt_tokens > prompt
