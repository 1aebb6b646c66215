"""Values of schemas that llguidance does not read are dropped where they are notes, else named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from hostile_grammars import grammars
from moaspec_core.errors import InputError
from moaspec_core.sampling.schema_values import FORMATS, LEAST, readable

OTHERS = [
    *("password", "binary", "byte", "path", "file-path", "directory-path", "decimal", "base64"),
    *("int32", "float", "url", "idn-email", "regex", "json-pointer", "json-string", "", "EMAIL"),
]
SECRET = {"type": "string", "format": "password"}


@pytest.mark.parametrize("name", [*sorted(FORMATS), *OTHERS])
def test_formats_that_are_kept_are_those_that_llguidance_knows(name: str) -> None:
    told = LLMatcher.grammar_from_json_schema({"type": "string", "format": name})
    is_unknown = LLMatcher.validate_grammar(told).startswith("Unknown format")
    assert is_unknown is (name not in FORMATS)
    assert ("format" in readable({"type": "string", "format": name})) is not is_unknown


NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "format": SECRET,
        "const": SECRET,
        "day": {"type": "string", "format": "date"},
        "list": {"type": "array", "items": SECRET, "prefixItems": [SECRET]},
        "either": {"anyOf": [SECRET, {"type": "integer", "format": "int32"}]},
        "far": {"$ref": "#/$defs/secret"},
        "fixed": {"const": {"format": "password"}},
    },
    "additionalProperties": SECRET,
    "$defs": {"secret": SECRET},
}


def test_formats_anywhere_and_nothing_else() -> None:
    plain = json.dumps(NESTED)
    for dropped in (', "format": "password"', ', "format": "int32"'):
        plain = plain.replace(dropped, "")
    assert json.dumps(readable(NESTED)) == plain
    assert grammars().json_schema(NESTED)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"const": 10**40}, f"the integer {10**40} is beyond 64 bits"),
        (
            {"properties": {"a": {"enum": [1, {"b": -(10**4000)}]}}},
            "the integer -10+... of 4001 digits",
        ),
        ({"enum": [5 - 2**63]}, "the integer -9"),  # llguidance would end the process
        ({"type": "number", "maximum": float("inf")}, "inf is no number of JSON"),
    ],
    ids=["const", "enum", "edge", "infinity"],
)
def test_numbers_that_are_refused(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^The JSON schema cannot be used: {message}"):
        grammars().json_schema(schema)


def test_numbers_of_64_bits() -> None:
    assert grammars().json_schema({"enum": [2**64 - 1, LEAST + 1]})


@pytest.mark.parametrize("before", ["", 'other: "x"\n'])
def test_errors_show_no_lines_of_a_grammar(before: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}}
    schema = {"type": "object", "propertyNames": schema}
    text = f"%llguidance {{}}\n{before}start: call\ncall: %json {json.dumps(schema)}\n"
    with pytest.raises(InputError) as caught:
        grammars().lark(text)
    told = 'Unimplemented keys: ["propertyNames"]'
    assert str(caught.value) == f"The JSON schema or grammar cannot be used: {told}"
    with pytest.raises(InputError, match=r'cannot be used: at 2\(8\): unknown name: "foo"$'):
        grammars().lark(f"%llguidance {{}}\nstart: foo\n{before}")
