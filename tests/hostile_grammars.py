"""Grammars whose compilation would end a process, or take very long."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import serving
from moaspec_core.errors import InputError
from moaspec_core.sampling.grammar import Grammars


def grammars(stops: frozenset[int] = frozenset({serving.END})) -> Grammars:
    return Grammars(serving.tokenizer(), vocab_size=serving.VOCAB, stop_token_ids=stops)


def chained(number: int, *, inside: bool = True) -> dict[str, Any]:
    """A schema with a chain of definitions."""
    names = [{"$ref": f"#/$defs/a{i + 1}"} for i in range(number)]
    made = [{"type": "object", "properties": {"x": one}} if inside else one for one in names]
    last = {f"a{number}": {"type": "string"}}
    return {"$defs": {f"a{i}": one for i, one in enumerate(made)} | last, "$ref": "#/$defs/a0"}


def rules(number: int, head: str = "", name: str = "r") -> str:
    """A grammar with a chain of rules (or terminals)."""
    lines = [f"start: {head} {name}0"]
    lines += [f'{name}{i}: "a" {name}{i + 1}' for i in range(number)]
    return "\n".join([*lines, f'{name}{number}: "b"', ""])


EXPENSIVE = {"type": "integer", "multipleOf": 999_983}
"""Takes longer to compile than a grammar may."""

HOSTILE: dict[str, Callable[[Grammars], object]] = {
    "definitions": lambda made: made.json_schema(chained(1900)),
    "bare references": lambda made: made.json_schema(chained(1900, inside=False)),
    "very many definitions": lambda made: made.json_schema(chained(4000)),
    "nested properties": lambda made: made.json_schema(nested(5000, "properties")),
    "nested alternatives": lambda made: made.json_schema(nested(5000, "anyOf")),
    "rules": lambda made: made.lark(rules(1900)),
    "very many rules": lambda made: made.lark(rules(4000)),
    "rules after a special token": lambda made: made.lark(rules(1900, "<|end|>")),
    "rules after a token's number": lambda made: made.lark(rules(1900, "<[257]>")),
    "terminals": lambda made: made.lark(rules(1900, name="T")),
    "a definition within Lark": lambda made: made.lark(
        f"start: <|end|> %json {json.dumps(chained(1900))}\n"
    ),
    "a slow regular expression": lambda made: made.lark(
        f"start: /{'a?' * 60_000}{'a' * 60_000}/\n"
    ),
    "one as long, after a special token": lambda made: made.lark(
        f"start: <|end|> /{'a?' * 60_000}{'a' * 60_000}/\n"
    ),
    "sent as it is": lambda made: made.compiled(
        json.dumps({"grammars": [{"lark_grammar": rules(1900)}]})
    ),
    "a divisor of many states": lambda made: made.json_schema(EXPENSIVE),
}


def wide(objects: int, keys: int) -> dict[str, Any]:
    """A strict schema of one of many objects, each with optional strings of its own."""
    text = {"type": "string"}
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {f"k{i}_{j}": text for j in range(keys)},
                "additionalProperties": False,
            }
            for i in range(objects)
        ]
    }


def nested(levels: int, how: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"anyOf": [schema]} if how == "anyOf" else {how: {"a": schema}}
    return schema


def refused_all() -> None:
    """Ask for each.

    Raises:
        AssertionError: one was accepted.
    """
    made = grammars()
    for name, ask in HOSTILE.items():
        try:
            ask(made)
        except InputError:
            continue
        raise AssertionError(f"{name}: accepted")
