"""Finds parts of a JSON schema that no finite text follows.

A part is finite if each of its `needs`, which hold together, has a finite alternative. That is
computed as in a Horn formula: a part whose needs are all met meets a need of others. The rest is
endless.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from moaspec_core.errors import InputError

Need = list[dict[str, Any]]
"""Schemas of which one must have a finite text; an empty need cannot be met."""


def check_ends(schema: dict[str, Any]) -> None:
    """InputError where the schema, or a part that it uses, requires itself without end.

    Also for keywords of another type, which those who read the schema later need not expect.
    """
    parts = list(_used(schema))
    for part in parts:
        _check_types(part)
    missing = {id(part): 0 for part in parts}
    users: defaultdict[int, list[tuple[int, list[int]]]] = defaultdict(list)
    for part in parts:
        for need in _needs(part, schema):
            missing[id(part)] += 1
            open_need = (id(part), [1])
            for alternative in need:
                users[id(alternative)].append(open_need)
    finite = [key for key, number in missing.items() if not number]
    while finite:
        for owner, still_open in users[finite.pop()]:
            if still_open[0]:
                still_open[0] = 0
                missing[owner] -= 1
                if not missing[owner]:
                    finite.append(owner)
    endless = [part for part in parts if missing[id(part)]]
    if endless:
        references = [part["$ref"] for part in endless if _referred(part, schema) is not None]
        raise InputError(
            "The JSON schema cannot be used: a part of it requires itself without end "
            f"(by the reference {references[0]!r}), so no text is complete. Let the recursion end, "
            "by a field that is not required, by null, or by an empty list."
        )


def _check_types(part: dict[str, Any]) -> None:
    for name, wanted, fits in (
        ("properties", "an object", lambda value: isinstance(value, dict)),
        ("required", "a list of names", _are_names),
        ("type", "a name or a list of names", lambda value: _are_names([value])),
        ("enum", "a list", lambda value: isinstance(value, list)),
    ):
        value = part.get(name)
        if name in part and not (fits(value) or (name == "type" and _are_names(value))):
            raise InputError(
                f"The JSON schema cannot be used: {name!r} must be {wanted}, got {value!r:.50}."
            )
    for key, value in part.get("properties", {}).items():
        if not isinstance(value, dict | bool):
            raise InputError(
                f"The JSON schema cannot be used: the property {key!r:.50} must have a schema, got "
                f"{value!r:.50}."
            )


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _used(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each schema that a text of this one may have to follow, once."""
    seen, left = set[int](), [schema]
    while left:
        part = left.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        inner = [part.get(name) for name in ("items", "additionalProperties")]
        for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
            inner += _list(part.get(name))
        for name in ("properties", "patternProperties"):
            inner += _dict(part.get(name)).values()
        inner.append(_referred(part, schema))
        left += [one for one in inner if isinstance(one, dict)]


def _needs(part: dict[str, Any], root: dict[str, Any]) -> Iterator[Need]:
    """What must have a finite text for this part to have one; other keywords need nothing."""
    for name in ("anyOf", "oneOf"):
        alternatives = _list(part.get(name))
        if alternatives and all(isinstance(alternative, dict) for alternative in alternatives):
            yield alternatives
    single: list[Any] = [*_list(part.get("allOf")), _referred(part, root)]
    if part.get("type") == "object":
        named, others = _dict(part.get("properties")), part.get("additionalProperties")
        if part.get("patternProperties"):
            others = None
        for key in _list(part.get("required")):
            single.append(named.get(key, others) if isinstance(key, str) else None)
    if part.get("type") == "array" and isinstance(least := part.get("minItems"), int):
        first = _list(part.get("prefixItems"))
        single += first[: max(least, 0)]
        single += [part.get("items")] if least > len(first) else []
    for one in single:
        if isinstance(one, dict):
            yield [one]


def _referred(part: dict[str, Any], root: dict[str, Any]) -> Any:
    """The schema to which `$ref` refers; None without one, or where it is not in this document."""
    reference = part.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for name in unquote(reference[1:]).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isascii() and name.isdigit() and len(name) < 6:
            found = found[int(name)] if int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
