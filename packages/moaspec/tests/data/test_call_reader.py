"""Tool calls read back in the forms of several models, whole and in pieces."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moaspec_core.chat.call_forms import (
    FUNCTOOLS,
    GLM,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_IDENTIFIED,
    MISTRAL_NAMED,
    PHI,
    PYTHON,
    QWEN_XML,
    CallForm,
    form_of,
)
from moaspec_core.chat.call_reader import CallReader

CALL = '{"name": "time", "arguments": {"city": "Rome"}}'
ARGUMENTS = '{"city": "Rome"}'
LLAMA_CALL = '{"name": "time", "parameters": {"city": "Rome"}}'


def read(
    form: CallForm, text: str, size: int, schema: dict[str, Any] | None = None
) -> tuple[str, list[dict[str, Any]]]:
    """Feed a text in pieces; the said text and the calls' arguments."""
    reader = CallReader(form, {"time": schema or {}})
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    said = "".join(reader.feed(piece, last=False)[0] for piece in pieces)
    said += reader.feed("", last=True)[0]
    return said, [json.loads(call.arguments) for call in reader.calls]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("form", "text", "said", "calls"),
    [
        (HERMES, "no call here", "no call here", 0),
        (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", 1),
        (HERMES, f"Look: <tool_call>{CALL}</tool_call>", "Look: ", 1),
        (HERMES, f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>\n", "", 2),
        (HERMES, f"<tool_call>{CALL}", "", 1),  # the text ended within its last mark
        (HERMES, "a <tool b", "a <tool b", 0),
        (HERMES, "<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", 0),
        (HERMES, '<tool_call>{"name": "x"}', '<tool_call>{"name": "x"}', 0),
        (LLAMA, LLAMA_CALL, "", 1),
        (LLAMA, f"{LLAMA_CALL};{LLAMA_CALL}", "", 2),
        (LLAMA, f"{LLAMA_CALL}\n{LLAMA_CALL}\n", "", 2),
        (LLAMA, f"{LLAMA_CALL}\n{LLAMA_CALL[:-5]}", f"\n{LLAMA_CALL[:-5]}", 1),  # at the limit
        (LLAMA, f"Look: {LLAMA_CALL}", f"Look: {LLAMA_CALL}", 0),
        (LLAMA, "plain { text", "plain { text", 0),
        (LLAMA, '{"other": 1}', '{"other": 1}', 0),
        (MISTRAL, f"[TOOL_CALLS][{CALL}, {CALL}]", "", 2),
        (MISTRAL, f"[TOOL_CALLS] {CALL}", "", 1),
        (MISTRAL, "[TOOL", "[TOOL", 0),
        (MISTRAL, f"[TOOL_CALLS] [TOOL_CALLS]{CALL}", "[TOOL_CALLS] ", 1),
        (MISTRAL_NAMED, f"Now [TOOL_CALLS]time[ARGS]{ARGUMENTS}", "Now ", 1),
        (MISTRAL_NAMED, f"[TOOL_CALLS]time[CALL_ID]abcDEF123[ARGS]{ARGUMENTS}", "", 1),
        (MISTRAL_NAMED, f"[TOOL_CALLS] [{CALL}]", "", 1),
        (MISTRAL_NAMED, "[TOOL_CALLS]day[ARGS]{}", "[TOOL_CALLS]day[ARGS]{}", 0),
        (MISTRAL_NAMED, "[TOOL_CALLS]time and", "[TOOL_CALLS]time and", 0),
        (MISTRAL_NAMED, f"[TOOL_CALLS] [TOOL_CALLS]time[ARGS]{ARGUMENTS}", "[TOOL_CALLS] ", 1),
        (HERMES, f'<tool_call>{{"type": "function", "function": {CALL}}}</tool_call>', "", 1),
    ],
)
def test_reading(form: CallForm, text: str, said: str, calls: int, size: int) -> None:
    assert read(form, text, size) == (said, [{"city": "Rome"}] * calls)


FORMS = {
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "phi": PHI,
    "functools": FUNCTOOLS,
    "named": MISTRAL_NAMED,
    "identified": MISTRAL_IDENTIFIED,
    "qwen-xml": QWEN_XML,
    "glm": GLM,
    "python": PYTHON,
}
JSON_FORMS = [form for form in FORMS.values() if not form.tags and not form.python]
HOSTILE = [
    "</tool_call>",
    "<tool_call>",
    '<tool_call>{"name": "time", "arguments": {}}</tool_call>',
    "[TOOL_CALLS]",
    "]",
    "<|/tool_call|>",
    "; or {Oslo}",
    "</parameter>",
    "</function>",
    "</parameter>\n</function>\n</tool_call>",
    "a</parameter></function></tool_call>\n b",
    "</parameter>\n<parameter=city>\n1",
    "</arg_value>",
    "</arg_value>\n</tool_call>\n",
    "</arg_value>\n<arg_key>city</arg_key>\n<arg_value>x",
    """it's "so" \\' ")], time(city='x')]""",
    'a "quoted" \\ text}',
    "\n\t line",
    "K\u00f6ln \U0001f600",
    "",
]


def written(form: CallForm, *arguments: dict[str, Any]) -> str:
    return form.written(
        [{"id": "abcDEF123", "function": {"name": "time", "arguments": one}} for one in arguments]
    )


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_marks_within_strings_are_text(form: CallForm, value: str, size: int) -> None:
    arguments = {"city": value, "deep": {"list": [1, {"x": value}]}}
    assert read(form, written(form, arguments), size) == ("", [arguments])


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_escapes_and_raw_line_breaks(size: int) -> None:
    text = '<tool_call>{"name": "time", "arguments": {"a": "\\u003c/tool_call\\u003e \n"}}'
    assert read(HERMES, f"{text}</tool_call>", size) == ("", [{"a": "</tool_call> \n"}])
    assert read(HERMES, text, size)[1] == [{"a": "</tool_call> \n"}]


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("form", [HERMES, MISTRAL, PHI], ids=["hermes", "mistral", "phi"])
def test_text_around_calls(form: CallForm, size: int) -> None:
    text = f"Before. {written(form, {'a': 1}, {'b': 2})}\n After."
    said, calls = read(form, text, size)
    assert calls == [{"a": 1}, {"b": 2}]
    assert said == "Before. \n After."


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_call_that_the_limit_cuts_is_text(form: CallForm, size: int) -> None:
    whole = written(form, {"city": "Rome </tool_call> ]"})
    for length in range(len(whole) - len(form.after) - len(form.end)):
        said, calls = read(form, whole[:length], size)
        assert calls == []
        assert said.strip() == whole[:length].strip()


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "x", "arguments": {"a": "<tool_call>"}}</tool_call>',
        '<tool_call>{"name": "time" "arguments"}</tool_call>',
        '<tool_call>{"name": ["time"]}</tool_call>',
        '<tool_call>{"name": "time", "arguments": {"a": 1}</tool_call>',
        '<tool_call>{"name": "time", "arguments": {"a": 1e999}}</tool_call>',
        "<tool_call>" + "[" * 100_000,
        "<tool_call></tool_call>",
    ],
    ids=["unknown", "comma", "list", "open", "infinite", "deep", "empty"],
)
def test_what_is_no_call_is_said(text: str) -> None:
    assert read(HERMES, text, 7) == (text, [])


def test_a_broken_call_hides_no_later_one() -> None:
    text = f'<tool_call>{{"name": "time", oops}}</tool_call><tool_call>{CALL}</tool_call>'
    said, calls = read(HERMES, text, 3)
    assert calls == [{"city": "Rome"}]
    assert said == '<tool_call>{"name": "time", oops}</tool_call>'


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_one_call_where_several_are_not_allowed(form: CallForm) -> None:
    reader = CallReader(form, {"time": {}}, parallel=False)
    said, calls = reader.feed(written(form, {"a": 1}, {"b": 2}), last=True)
    assert (said, [json.loads(call.arguments) for call in calls]) == ("", [{"a": 1}])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_cut_call_is_no_content(form: CallForm) -> None:
    """Wherever a limit cuts: no marks are said, and whole calls stay."""
    calls, schema = ({"a": "b"}, {"a": "c d"}), {"properties": {"a": {"type": "string"}}}
    text = written(form, *calls)
    for end in range(len(text) + 1):
        for forced in (True, False):
            reader = CallReader(form, {"time": schema}, forced=forced)
            said, found = reader.feed(text[:end], last=True, cut=True)
            assert [json.loads(call.arguments) for call in found] == list(calls[: len(found)])
            # A bare call that is cut may be any JSON, and the first letters of a mark any text.
            if forced or (form.trigger and 2 * end > len(form.trigger)):
                assert said == ""
    assert len(found) == 2


def test_text_around_a_cut_call_stays() -> None:
    reader = CallReader(HERMES, {"time": {}})
    said, calls = reader.feed(f"Look: <tool_call>{CALL[:20]}", last=True, cut=True)
    assert (said, calls) == ("Look: ", [])
    said, calls = CallReader(HERMES, {"time": {}}).feed("a < b and a <t", last=True, cut=True)
    assert said == "a < b and a <t"


def test_calls_arrive_when_their_json_is_complete() -> None:
    reader = CallReader(MISTRAL, {"time": {}})
    assert len(reader.feed(f"[TOOL_CALLS][{CALL}]", last=False)[1]) == 1
    assert reader.feed("Said", last=False)[0] == "Said"


SLOW = [HealthCheck.too_slow]
"""A busy machine is no fault."""

leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(HOSTILE)
inner = leaves | st.lists(leaves, max_size=3)
values = inner | st.dictionaries(st.text(max_size=4), inner, max_size=3)


@pytest.mark.slow
@settings(deadline=None, suppress_health_check=SLOW)
@given(
    form=st.sampled_from(JSON_FORMS),
    calls=st.lists(
        st.dictionaries(st.text(max_size=4), values, max_size=3), min_size=1, max_size=3
    ),
    size=st.integers(1, 40),
)
def test_what_is_written_is_read(form: CallForm, calls: list[dict[str, Any]], size: int) -> None:
    assert read(form, written(form, *calls), size) == ("", calls)


# In tags, a value that holds a whole other argument on a line of its own is two arguments.
SINGLE = [value for value in HOSTILE if "=city>" not in value and "city</arg_key>" not in value]
TYPES: dict[str, st.SearchStrategy[Any]] = {
    "string": st.text(max_size=8) | st.sampled_from([*SINGLE, "5", "true", "None", "{}"]),
    "integer": st.integers(),
    "number": st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "null": st.none(),
    "array": st.lists(leaves, max_size=3),
    "object": st.dictionaries(st.text(max_size=4), leaves, max_size=3),
}
SCHEMA = {"type": "object", "properties": {name: {"type": name} for name in TYPES}}


@settings(deadline=None, suppress_health_check=SLOW)
@given(
    form=st.sampled_from([QWEN_XML, GLM, PYTHON]),
    calls=st.lists(st.fixed_dictionaries({}, optional=TYPES), min_size=1, max_size=3),
    size=st.integers(1, 40),
)
def test_types_follow_the_schema(form: CallForm, calls: list[dict[str, Any]], size: int) -> None:
    assert read(form, written(form, *calls), size, SCHEMA) == ("", calls)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "integer"}, "5", 5),
        ({"type": "number"}, "5", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "None", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": 1}, "1", 1),
        ({"$ref": "#/$defs/Name"}, "12", "12"),
        ({"$ref": "#/$defs/Circle"}, "12", 12),
        ({}, "[1, 2]", [1, 2]),
        ({}, "a text", "a text"),
        ({}, '"quoted"', '"quoted"'),
    ],
)
def test_a_value_of_each_type(schema: dict[str, Any], text: str, value: Any) -> None:
    defs = {"Name": {"type": "string"}, "Circle": {"$ref": "#/$defs/Circle"}}
    whole = {"properties": {"city": schema}, "$defs": defs}
    for form, call in (
        (QWEN_XML, f"\n<function=time>\n<parameter=city>\n{text}\n</parameter>\n</function>\n"),
        (GLM, f"time\n<arg_key>city</arg_key>\n<arg_value>{text}</arg_value>\n"),
    ):
        assert read(form, f"<tool_call>{call}</tool_call>", 3, whole) == ("", [{"city": value}])


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("form", "text", "said", "calls"),
    [
        (QWEN_XML, "<tool_call><function=time></function></tool_call>", "", [{}]),
        (
            QWEN_XML,
            "<tool_call><function=time><parameter=a>b</parameter></function>",
            "",
            [{"a": "b"}],
        ),
        (
            QWEN_XML,
            "<tool_call><function=time><parameter=a>b</parameter><parameter=city>c</parameter>"
            "</function></tool_call>",
            "",
            [{"a": "b", "city": "c"}],
        ),
        (
            QWEN_XML,
            "<tool_call>\n<function=time>\n<parameter=a>\n1\n</parameter>\n<parameter=typo>\n2\n"
            "</parameter>\n</function>\n</tool_call>",
            "",
            [{"a": 1, "typo": 2}],
        ),
        (QWEN_XML, f"<tool_call>\n{CALL}\n</tool_call>", "", [{"city": "Rome"}]),
        (GLM, f"<tool_call>{CALL}</tool_call>", "", [{"city": "Rome"}]),
        (GLM, "<tool_call>time</tool_call>\n<tool_call>time\n</tool_call>", "", [{}, {}]),
        (
            GLM,
            "So: <tool_call>time<arg_key>a</arg_key><arg_value>b</arg_value><arg_key>city</arg_key>"
            "<arg_value>c</arg_value></tool_call>",
            "So: ",
            [{"a": "b", "city": "c"}],
        ),
        (PYTHON, "[time()]", "", [{}]),
        (PYTHON, "\n[ time ( city = 'Rome' , ), time()]", "", [{"city": "Rome"}, {}]),
        (PYTHON, "[time(city='Rome', b=-1.5e3,), time(),]", "", [{"city": "Rome", "b": -1500}, {}]),
        (
            PYTHON,
            "[time(a=True, b=null, c=(1, [2], {'x': 'y'}))]",
            "",
            [{"a": True, "b": None, "c": [1, [2], {"x": "y"}]}],
        ),
        (
            PYTHON,
            r"[time(a='\'\\\n\u00fc\ud83d\ude00\d')]",
            "",
            [{"a": "'\\\n\u00fc\U0001f600\\d"}],
        ),
        (PYTHON, "[time(a='\n')]", "", [{"a": "\n"}]),
        (PYTHON, LLAMA_CALL, "", [{"city": "Rome"}]),
    ],
)
def test_forms_without_json(
    form: CallForm, text: str, said: str, calls: list[dict[str, Any]], size: int
) -> None:
    assert read(form, text, size, {"properties": {"city": {}}}) == (said, calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (QWEN_XML, "<tool_call><function=x></function></tool_call>"),
        (QWEN_XML, "<tool_call><function=time>oops</function></tool_call>"),
        (QWEN_XML, "<tool_call><function=time><parameter=a>b</function></tool_call>"),
        (QWEN_XML, "<tool_call>"),
        (GLM, "<tool_call>timer</tool_call>"),
        (GLM, "<tool_call>time<arg_key>a</arg_key><arg_value>b</tool_call>"),
        (GLM, "<tool_call>time"),
        (PYTHON, "[1] says so"),
        (PYTHON, "[time] is money"),
        (PYTHON, "[time('Rome')]"),
        (PYTHON, "[time(a=b)]"),
        (PYTHON, "[time(a='\\ud800')]"),
        (PYTHON, "[time(), x()]"),
        (PYTHON, "[time(a=" + "[" * 100_000),
        (PYTHON, "[time(a=" + "[" * 5000 + "]" * 5000 + ")]"),
    ],
)
def test_what_is_no_call_in_these_forms(form: CallForm, text: str) -> None:
    assert read(form, text, 1000) == (text, [])


def test_a_text_that_cannot_become_a_call_is_not_held_back() -> None:
    for form, text in (
        (QWEN_XML, "<tool_call>is a mark"),
        (GLM, "<tool_call>is a mark"),
        (PYTHON, "[1] says"),
    ):
        assert CallReader(form, {"time": {}}).feed(text, last=False) == (text, [])


@pytest.mark.slow
@settings(deadline=None, suppress_health_check=SLOW)
@given(
    form=st.sampled_from(list(FORMS.values())),
    parts=st.lists(
        st.sampled_from(
            [
                *(*HOSTILE, CALL, LLAMA_CALL, "<tool", "_call>", "[TOOL_", "CALLS]"),
                *("{", "}", '"', " ", "<function=time>", "<parameter=a>", "time", "[time(", ")]"),
                *("<arg_key>a</arg_key>", "<arg_value>", "a=", "'"),
            ]
        ),
        max_size=6,
    ),
    size=st.integers(1, 30),
)
def test_pieces_change_nothing(form: CallForm, parts: list[str], size: int) -> None:
    text = "".join(parts)
    assert read(form, text, size) == read(form, text, len(text) + 1)


def test_ids_are_such_as_every_template_takes() -> None:
    reader = CallReader(HERMES, {"time": {}})
    (call,) = reader.feed(f"<tool_call>{CALL}</tool_call>", last=True)[1]
    assert re.fullmatch("[a-zA-Z0-9]{9}", call.id)


def test_an_id_that_the_model_wrote_is_kept() -> None:
    own = CALL[:-1] + ', "id": "abcDEF123"}'
    reader = CallReader(MISTRAL, {"time": {}})
    first = reader.feed(f"[TOOL_CALLS][{own}]", last=False)[1]
    second = reader.feed(f"[TOOL_CALLS][{own}]", last=True)[1]
    assert first[0].id == "abcDEF123" != second[0].id
    (named,) = CallReader(MISTRAL_IDENTIFIED, {"time": {}}).feed(
        "[TOOL_CALLS]time[CALL_ID]abcDEF123[ARGS]{}", last=True
    )[1]
    assert named.id == "abcDEF123"
    twice = CallReader(MISTRAL, {"time": {}}).feed(f"[TOOL_CALLS][{own}, {own}]", last=True)[1]
    assert len({call.id for call in twice}) == 2


@pytest.mark.parametrize("given", ["", ', "arguments": null', ', "arguments": {}'])
def test_absent_arguments_are_an_empty_object(given: str) -> None:
    text = f'<tool_call>{{"name": "time"{given}}}</tool_call>'
    assert read(HERMES, text, 5) == ("", [{}])


def test_forms_are_found_in_templates() -> None:
    assert form_of("{{ tools }} <tool_call> ...") is HERMES
    assert form_of('{{ tools }} {"name": ..., "parameters": ...}') is LLAMA
    assert form_of("{{ tools }} [TOOL_CALLS]") is MISTRAL
    assert form_of("{{ tools }} [TOOL_CALLS] [ARGS]") is MISTRAL_NAMED
    assert form_of("{{ tools }} [TOOL_CALLS] [CALL_ID] [ARGS]") is MISTRAL_IDENTIFIED
    assert form_of("{{ tools }} <tool_call> <function=x> <parameter=y> </parameter>") is QWEN_XML
    assert form_of("{{ tools }} <tool_call> <arg_key> <arg_value> </arg_value>") is GLM
    assert form_of('{{ tools }} [f(a=1)] {"name": ..., "parameters": ...}') is PYTHON
    assert form_of("{% set x = [namespace(a=1)] %}") is HERMES
    assert form_of("nothing known") is HERMES
    assert form_of("nothing known", ["<|tool_call|>"]) is PHI
