"""Schemas whose texts would never be complete are refused; recursion that may end is not."""

from __future__ import annotations

from typing import Any

import pytest

from hostile_grammars import chained
from moaspec_core.errors import InputError
from moaspec_core.sampling.endless_schemas import check_ends

ITSELF = {"$ref": "#/$defs/a"}


def node(**child: Any) -> dict[str, Any]:
    """A schema of an object that has a child."""
    a = {"type": "object", "properties": {"x": child}, "required": ["x"]}
    return {"$defs": {"a": a}, "$ref": "#/$defs/a"}


ENDLESS: dict[str, dict[str, Any]] = {
    "itself": {"$ref": "#"},
    "two references": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": ITSELF}, **ITSELF},
    "a required child": node(**ITSELF),
    "behind a list": node(type="array", items=ITSELF, minItems=1),
    "first of a tuple": node(type="array", prefixItems=[{"type": "null"}, ITSELF], minItems=2),
    "each alternative": node(anyOf=[ITSELF, {"allOf": [{"type": "object"}, ITSELF]}]),
    "a member without a name": {
        "type": "object",
        "required": ["x"],
        "additionalProperties": {"$ref": "#"},
    },
    "in an optional part": {"type": "object", "properties": {"y": ITSELF}, **node(**ITSELF)},
    "escaped": {"$defs": {"a/b %": {"$ref": "#/$defs/a~1b%20%25"}}, "$ref": "#/$defs/a~1b%20%25"},
}
FINITE: dict[str, dict[str, Any]] = {
    "null": node(anyOf=[ITSELF, {"type": "null"}]),
    "an empty list": node(type="array", items=ITSELF),
    "a short tuple": node(type="array", prefixItems=[{"type": "null"}, ITSELF], minItems=1),
    "optional": {"type": "object", "properties": {"x": {"$ref": "#"}}},
    "a scalar beside": node(type=["object", "null"], required=["y"], properties={"y": ITSELF}),
    "any text": {"type": "object", "required": ["x"]},
    "no such place": {"$ref": "#/$defs/nothing/0"},
    "odd types": {"anyOf": 3, "type": "object", "items": None, "$ref": 5, "minItems": "x"},
    "a long chain": chained(5000),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_schemas_are_refused_by_name(name: str) -> None:
    with pytest.raises(InputError, match=r"requires itself without end.*reference '#"):
        check_ends(ENDLESS[name])


@pytest.mark.parametrize(
    "odd",
    [
        {"required": "x"},
        {"required": [["x"]]},
        {"properties": []},
        {"properties": {"x": 1}},
        {"type": 5},
        {"type": [None]},
        {"enum": "x"},
    ],
)
def test_keywords_of_another_type_are_refused_by_name(odd: dict[str, Any]) -> None:
    (name,) = odd
    for schema in (odd, {"anyOf": [{"type": "null"}, odd]}):
        with pytest.raises(InputError, match="property 'x'|" + name):
            check_ends(schema)


@pytest.mark.parametrize("name", FINITE)
def test_recursion_that_may_end_is_taken(name: str) -> None:
    check_ends(FINITE[name])
