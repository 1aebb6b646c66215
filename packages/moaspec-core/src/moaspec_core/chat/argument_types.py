"""Types of arguments that a model writes as plain text, by the JSON schema of its function."""

import json
from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}
MAX_REFERENCES = 16
"""References that are followed one after another; a longer chain may be a circle."""


def properties_of(schema: Schema) -> Mapping[str, Schema]:
    """Schemas of a function's arguments, by name; empty where it lists none."""
    found = _resolved(schema, schema).get("properties")
    if not isinstance(found, Mapping):
        return {}
    return {key: _resolved(one, schema) for key, one in found.items()}


def types_of(schema: Schema, root: Schema, depth: int = 0) -> frozenset[str]:
    """JSON types that a schema allows; all of them where it names none."""
    schema = _resolved(schema, root)
    named = schema.get("type")
    if named is not None:
        return frozenset([named] if isinstance(named, str) else named)
    if "const" in schema or isinstance(schema.get("enum"), list):
        return frozenset(map(json_type, schema.get("enum", [schema.get("const")])))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and depth < MAX_REFERENCES:
            return frozenset().union(*(types_of(one, root, depth + 1) for one in schema[key]))
    return ALL_TYPES


def json_type(value: Any) -> str:
    """The JSON schema's name of a value's type."""
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object"}
    return names.get(type(value), "array")


def typed(text: str, types: frozenset[str]) -> Any:
    """A text (JSON, a constant of Python, or plain) as a value of a JSON type, or as it is."""
    if types == {"string"}:
        return text
    word = text.strip()
    try:
        value = PYTHON_CONSTANTS[word] if word in PYTHON_CONSTANTS else json.loads(word)
    except (ValueError, RecursionError):
        return text
    kind = json_type(value)
    if kind == "string" and "string" in types:
        return text  # a text in quotation marks
    fits = kind in types or (kind == "integer" and "number" in types)
    return value if fits else text


def as_text(value: Any) -> str:
    """A value as such templates write it: texts as they are, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _resolved(schema: Any, root: Schema) -> Schema:
    """Follow `$ref`s within the same document."""
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        schema = _at(root, reference)
    return schema if isinstance(schema, Mapping) else {}


def _at(root: Any, reference: str) -> Any:
    for key in filter(None, reference.removeprefix("#").split("/")):
        root = root.get(key.replace("~1", "/").replace("~0", "~"), {}) if root else {}
    return root
