"""The limits of everything that one request may hold, for HTTP and gRPC alike.

`docs/security.md` shows this table; a test compares the two.
"""

from __future__ import annotations

from typing import Any

MAX_GRAMMAR = 1 << 18
"""Characters of a grammar, made from a JSON schema or tools, or sent as it is."""

MAX_GRAMMAR_RULES = 2000
"""Rules of a grammar and references of a JSON schema, together."""

MAX_GRAMMAR_STACK = 2 << 20
"""Bytes of native stack that compiling a grammar may take; this bounds chains of references and
nesting. The compilation whose result is used has eight times as much."""

MAX_GRAMMAR_MEMORY = 1 << 30
"""Bytes of address space of the process that tries a grammar."""

MAX_GRAMMAR_S = 5
"""Seconds of processor time that compiling a grammar may take."""

MAX_JSON_DEPTH = 100
"""Levels of nested objects and arrays in a JSON schema or in variables of a chat template."""

MAX_PREPARING = 4
"""Requests whose prompts are tokenised and whose grammars are compiled at the same time; one of
each client."""

MAX_PREPARING_WAITING = 64
"""Requests of one client that may wait for that."""


def too_deep(value: Any) -> bool:
    """Whether a JSON value has more than `MAX_JSON_DEPTH` levels; never recurses."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        children = [_children(one) for one in level]
        level = [child for some in children for child in some if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
