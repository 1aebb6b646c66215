"""Values of a JSON schema that llguidance does not read."""

import math
from typing import Any

from moaspec_core.errors import InputError

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""Formats of strings that llguidance follows. It refuses all others, which JSON Schema takes as
notes for the reader."""

LEAST = -(2**63) + 1024
"""llguidance ends the process at integers that, as float64, are -2^63."""

DATA = ("const", "default", "enum", "example", "examples")  # keywords whose values are no schemas
SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords of objects that hold schemas by name; a name may be that of a keyword."""


def readable(schema: Any) -> Any:
    """A copy of a schema without the formats that llguidance does not know.

    Raises:
        InputError: a number that it cannot read.
    """
    if isinstance(schema, list):
        return [readable(part) for part in schema]
    if not isinstance(schema, dict):
        _check_number(schema)
        return schema
    made = {}
    for key, value in schema.items():
        if key in DATA:
            made[key] = _checked(value)
        elif key in SCHEMAS and isinstance(value, dict):
            made[key] = {name: readable(part) for name, part in value.items()}
        elif key != "format" or not isinstance(value, str) or value in FORMATS:
            made[key] = readable(value)
    return made


def _checked(data: Any) -> Any:
    """The same data; InputError for a number in it that llguidance cannot read."""
    left = [data]
    while left:
        one = left.pop()
        left += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        _check_number(one)
    return data


def _check_number(value: Any) -> None:
    if isinstance(value, int) and not LEAST < value < 2**64:
        raise InputError(
            f"The JSON schema cannot be used: the integer {_shown(value)} is beyond 64 bits. "
            "Leave it out, or describe it by a pattern of a string."
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(
            f"The JSON schema cannot be used: {value} is no number of JSON. Leave it out."
        )


def _shown(value: int) -> str:
    text = str(value)
    return text if len(text) <= 42 else f"{text[:20]}... of {len(text.lstrip('-'))} digits"
