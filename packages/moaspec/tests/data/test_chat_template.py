"""What templates take is found by rendering, and training renders what serving renders."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import serving
import templates
from moaspec.data.conversations import Conversation, parse
from moaspec.data.loss_mask import masked_tokens, prompt_ids
from moaspec.data.rows import Row
from moaspec_core.chat.call_forms import (
    GLM,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_IDENTIFIED,
    MISTRAL_NAMED,
    PHI,
    PYTHON,
    QWEN_XML,
)
from moaspec_core.chat.chat_template import ChatTemplate
from moaspec_core.chat.messages import normal_messages, normal_tool
from moaspec_core.errors import InputError
from moaspec_serve.openai.chat_input import ChatInput, normal_tools
from moaspec_serve.openai.chat_schema import ChatRequest
from moaspec_serve.server_context import ServerContext, ServeSettings

Json = dict[str, Any]
TIME = {"name": "time", "description": "Tells it.", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": TIME}]
LONG_ID = "call_0123456789abcdef0123456789abcdef"


@functools.cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate(serving.tokenizer(templates.TOOL_TEMPLATES[name]))


@functools.cache
def desk(name: str) -> ServerContext:
    return ServerContext(serving.source(template=templates.TOOL_TEMPLATES[name]), ServeSettings())


def calls(*cities: str) -> list[Json]:
    return [
        {
            "id": f"{LONG_ID}{number}",
            "type": "function",
            "function": {"name": "time", "arguments": json.dumps({"city": city})},
        }
        for number, city in enumerate(cities)
    ]


def loop(*cities: str) -> list[Json]:
    """A question, calls, their results and the answer."""
    results = [
        {"role": "tool", "tool_call_id": f"{LONG_ID}{i}", "content": f"noon in {city}"}
        for i, city in enumerate(cities)
    ]
    return [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "What time?"},
        {"role": "assistant", "content": None, "tool_calls": calls(*cities)},
        *results,
        {"role": "assistant", "content": "Noon."},
        {"role": "user", "content": "Thanks."},
    ]


MISTRALS = {"mistral-v3", "mistral-nemo", "mistral-small", "devstral"}


def text(name: str, messages: list[Json], tools: Any = TOOLS, **how: Any) -> str:
    found = template(name)
    prepared = found.prepare(normal_messages(messages), list(map(normal_tool, tools)), **how)
    return found.text(prepared, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("name", "place", "form"),
    [
        ("llama31", "tools", LLAMA),
        ("mistral-v3", "tools", MISTRAL),
        ("mistral-nemo", "tools", MISTRAL),
        ("mistral-small", "tools", MISTRAL_IDENTIFIED),
        ("devstral", "tools", MISTRAL_NAMED),
        ("qwen25", "tools", HERMES),
        ("qwen3", "tools", HERMES),
        ("hermes", "tools", HERMES),
        ("qwen3-coder", "tools", QWEN_XML),
        ("glm45", "tools", GLM),
        ("llama4-python", "tools", PYTHON),
        ("phi4-mini", "text message", PHI),
        ("gemma3", None, HERMES),
        ("smollm2", None, HERMES),
        ("smollm3", "xml_tools", HERMES),
    ],
)
def test_where_tools_are_read_and_how_calls_are_written(name: str, place: Any, form: Any) -> None:
    assert (template(name).traits.tools_in, template(name).form) == (place, form)


@pytest.mark.parametrize(
    ("trait", "names"),
    [
        ("takes_any_call_id", MISTRALS),
        ("takes_parallel_calls", {"llama31"}),
        ("takes_system", {"gemma2"}),
        ("takes_tool_role", {"gemma2", "gemma3", "smollm2", "parts-only"}),
    ],
)
def test_what_only_some_templates_refuse(trait: str, names: set[str]) -> None:
    found = {name for name in templates.TOOL_TEMPLATES if not getattr(template(name).traits, trait)}
    assert found == names


@pytest.mark.parametrize(
    ("trait", "names"),
    [
        ("arguments_as_text", {"arguments-as-text"}),
        ("content_as_parts", {"parts-only"}),
        ("alternates", {*MISTRALS, "gemma2", "gemma3"}),
        ("takes_developer", set()),
    ],
)
def test_what_only_some_templates_demand(trait: str, names: set[str]) -> None:
    found = {name for name in templates.TOOL_TEMPLATES if getattr(template(name).traits, trait)}
    assert found == names


@pytest.mark.parametrize("name", templates.TOOL_TEMPLATES)
def test_every_template_tells_of_tools_calls_and_results(name: str) -> None:
    """Two calls in a turn, with ids as other servers write them, and quotes in the arguments."""
    found = text(name, loop("Rome", 'a "b" {c} </tool_call>'))
    for said in ("time", "Be kind.", "What time?", "Rome", "noon in Rome", "Noon.", "Thanks."):
        assert said in found
    value = 'a "b" {c} </tool_call>'
    assert (value if template(name).form.tags else json.dumps(value)) in found
    assert '\\\\"' not in found  # nothing is written as JSON twice


def test_ids_of_calls_and_results_are_changed_alike() -> None:
    found = text("mistral-v3", loop("Rome", "Oslo"))
    ids = [part[:9] for part in found.split('id": "')[1:]]
    assert len(set(ids)) == 2
    assert ids[:2] == ids[2:]
    assert all(one.isalnum() for one in ids)
    own = copy.deepcopy(loop("Rome"))
    own[2]["tool_calls"][0]["id"] = own[3]["tool_call_id"] = "abcDEF123"
    assert text("mistral-v3", own).count("abcDEF123") == 2


def test_several_calls_become_several_turns() -> None:
    found = text("llama31", loop("Rome", "Oslo"))
    places = [found.index(f'{{"city": "{city}"}}') for city in ("Rome", "Oslo")]
    assert places[0] < found.index("noon in Rome") < places[1] < found.index("noon in Oslo")


def test_a_named_template_for_tools() -> None:
    tokenizer = serving.tokenizer()
    tokenizer.chat_template = {"default": serving.CHATML, "tool_use": templates.HERMES}
    renderer = ChatTemplate(tokenizer)
    assert renderer.traits.tools_in == "tools"
    for tools in (TOOLS, []):  # calls of the history need it, too
        prepared = renderer.prepare(normal_messages(loop("Rome")), list(map(normal_tool, tools)))
        assert "<tool_response>\nnoon" in renderer.text(prepared)
    plain = renderer.prepare(normal_messages([{"role": "user", "content": "x"}]))
    assert plain.source == serving.CHATML


def test_developers_are_systems_unless_the_template_knows_them() -> None:
    messages = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "x"}]
    assert "system\nBe kind." in text("qwen25", messages, [])
    knows = templates.ASK + (
        "{% for m in messages %}{{ '#' if m.role == 'developer' else m.role }}{{ m.content }}"
        "{% endfor %}"
    )
    renderer = ChatTemplate(serving.tokenizer(knows))
    assert renderer.text(renderer.prepare(normal_messages(messages))) == "#Be kind.userx"


def test_parts_are_joined_as_templates_join_them() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    for name in ("qwen25", "gemma3", "parts-only"):
        assert "one two" in text(name, [{"role": "user", "content": parts}], [])


def test_the_last_message_is_continued() -> None:
    messages = normal_messages(
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is "}]
    )
    for name in ("qwen25", "llama31", "mistral-v3", "gemma3"):
        renderer = template(name)
        ids = renderer.tokenize(renderer.rendered(messages, continue_final_message=True))
        assert renderer.tokenizer.decode(ids).rstrip().endswith("It is")


def test_calls_are_not_continued() -> None:
    messages = normal_messages(loop("Rome")[:3])
    with pytest.raises(InputError, match="the last message has tool calls"):
        template("qwen25").rendered(messages, continue_final_message=True)


@pytest.mark.parametrize("value", [1, 2.5, None, True, [1, "a"], {"b": None}])
def test_variables_of_any_type(value: Any) -> None:
    renderer = ChatTemplate(serving.tokenizer("{{ x | tojson }}{{ messages[0].content }}"))
    prepared = renderer.prepare(
        normal_messages([{"role": "user", "content": "q"}]), (), {"x": value}
    )
    assert renderer.text(prepared) == json.dumps(value) + "q"
    with pytest.raises(InputError, match="chat_template"):
        renderer.prepare((), (), {"chat_template": value})


def test_arguments_that_are_no_json_stay_what_they_are() -> None:
    broken = loop("Rome")
    broken[2]["tool_calls"][0]["function"]["arguments"] = '{"city": '
    assert r"{\"city\": " in text("qwen25", broken)


words = st.text(st.sampled_from('ab {}<>"\\\nü/'), min_size=1, max_size=8).map(
    lambda one: f"x{one}y"
)
contents = words | st.lists(words, min_size=1, max_size=2).map(
    lambda texts: [{"type": "text", "text": one} for one in texts]
)
arguments = st.dictionaries(
    st.sampled_from(["city", "day"]),
    words | st.integers(-9, 9) | st.none() | st.lists(words, max_size=2),
)


@st.composite
def conversations(draw: st.DrawFn) -> list[Json]:
    """In OpenAI's form; ends with an answer."""
    messages: list[Json] = []
    if draw(st.booleans()):
        role = draw(st.sampled_from(["system", "developer"]))
        messages.append({"role": role, "content": draw(contents)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(contents)})
        count = draw(st.integers(0, 2))
        if count:
            given_calls = calls(*[""] * count)
            for call in given_calls:
                call["function"]["arguments"] = json.dumps(draw(arguments))
            messages.append({"role": "assistant", "content": None, "tool_calls": given_calls})
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": draw(words)}
                for call in given_calls
            ]
        messages.append({"role": "assistant", "content": draw(words)})
    return messages


def served_ids(name: str, messages: list[Json], tools: list[Json]) -> list[int]:
    """What `/v1/chat/completions` gives the target."""
    body = {"model": "x", "messages": messages, "tools": tools}
    asked = ChatRequest.model_validate_json(json.dumps(body))
    given = desk(name).normal(asked.conversation())
    return desk(name).prompt(ChatInput(messages=given, tools=normal_tools(asked.tools)))


@pytest.mark.parametrize("name", templates.TOOL_TEMPLATES)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(messages=conversations(), with_tools=st.booleans())
def test_training_regenerating_and_serving_give_the_same_ids(
    name: str, messages: list[Json], with_tools: bool
) -> None:
    tools = TOOLS if with_tools else []
    ends = [i for i, one in enumerate(messages) if one["role"] == "assistant"]
    served = [served_ids(name, messages[:end], tools) for end in ends]
    for end, ids in zip(ends, served, strict=True):
        assert prompt_ids(template(name), row(messages[:end], tools)) == ids
    masked = masked_tokens(template(name), row(messages, tools), ())
    last = len(served[-1])
    assert list(masked.token_ids[:last]) == served[-1]
    assert not masked.written[last - 1]
    assert all(masked.written[last:])
    starts = {i for i, mark in enumerate(masked.written) if mark and not masked.written[i - 1]}
    of_turns = {len(ids) for ids in served if list(masked.token_ids[: len(ids)]) == ids}
    # A turn of several calls may be rendered as several turns, each with loss.
    assert of_turns <= starts if name == "llama31" else of_turns == starts


def row(messages: list[Json], tools: list[Json]) -> Conversation:
    return parse(Row("f:1", {"messages": messages, "tools": tools}))


def test_results_have_the_name_of_the_function() -> None:
    """Clients of OpenAI do not send it, and some templates read it."""
    call = {"id": "a", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    asked = [*loop("Rome")[:1], {"role": "assistant", "content": None, "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "a", "content": "noon"}
    assert normal_messages([*asked, result])[-1]["name"] == "time"
    assert normal_messages([*asked, {**result, "name": "own"}])[-1]["name"] == "own"
    assert "name" not in normal_messages([result])[-1]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.more }}", "no attribute 'nothing'"),
        ("{% for m in messages %}{{ m.content }", "unexpected '}'"),
        ("{{ messages | nofilter }}", "nofilter"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "recursion"),
        ("{{ '%d' % (1e400) }}", "inf"),
        ("{{ 1 // 0 }}", "zero"),
    ],
)
def test_failures_of_a_template_are_quoted(source: str, said: str) -> None:
    template = ChatTemplate(serving.tokenizer(source), "tiny")
    with pytest.raises(InputError, match=f"template of tiny refuses.*{said}"):
        template.rendered(serving.say("hi"))


def test_named_templates_without_a_default() -> None:
    named = {"rag": serving.CHATML, "tool_use": serving.CHATML}
    template = ChatTemplate(serving.tokenizer(named), "tiny")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="named rag, tool_use, and none named 'default'"):
        template.rendered(serving.say("hi"))
    tools = [normal_tool({"name": "time"})]
    assert "hi" in template.rendered(serving.say("hi"), tools)
    template.tokenizer.chat_template = named | {"default": serving.CHATML}
    assert "hi" in template.rendered(serving.say("hi"))
