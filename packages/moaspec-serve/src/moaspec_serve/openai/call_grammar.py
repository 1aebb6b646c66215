"""Grammars of tool calls."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from moaspec_core.chat.argument_types import as_text, properties_of, types_of
from moaspec_core.chat.call_forms import CALL_ID_LENGTH, CallForm
from moaspec_core.errors import InputError
from moaspec_core.sampling.grammar import COMPACT

ANY_TEXT = r"TEXT: /(.|\n)*/"
EMPTY_OBJECT_KEYWORDS = frozenset(
    ("type", "properties", "required", "additionalProperties", "description", "title", "$schema")
)
"""Keywords that a schema of an object without arguments may have."""


Function = Mapping[str, Any]
"""A function that the model may call: `name`, `description` and `parameters`, normalised."""


def call_grammar(
    form: CallForm,
    tools: Sequence[Function],
    *,
    forced: bool,
    parallel: bool,
    special: Mapping[str, int],
) -> str:
    """Make a grammar, in llguidance's Lark, of texts with well-formed calls.

    Args:
        forced: whether the text consists of calls only, with no argument that a schema does not
            name; else calls may follow any text.
        special: ids of the marks that are special tokens.

    Raises:
        InputError: the syntax is not JSON and a schema does not name all arguments.
    """
    if forced:
        tools = [{**tool, "parameters": closed(tool["parameters"])} for tool in tools]
    trigger = _mark(form.trigger, special)
    joint = _quoted(form.joint)
    calls = f"call ({joint} {'' if form.listed else trigger} call)*" if parallel else "call"
    body = f"{_quoted(form.before)} {calls} {_quoted(form.after)}" if form.listed else calls
    if forced:
        lines = [f"start: {trigger} {body}"]
    else:
        lazy = "" if form.trigger in special else "[lazy]"
        lines = [f"start: {'(head call)*' if parallel else '(head call)?'} rest"]
        lines = [f"start: (head {body})? rest"] if form.listed else lines
        lines += [f"head{lazy}: TEXT {trigger}", "rest: TEXT", ANY_TEXT]
    lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        lines += _call_rules(form, tool, f"call_{i}", special)
    if form.tags and not any(line.startswith("TEXT:") for line in lines):
        lines.append(ANY_TEXT)
    if form.identified:
        lines.append(f"ID: /[a-zA-Z0-9]{{{CALL_ID_LENGTH}}}/")
    return "%llguidance {}\n" + "\n".join(lines) + "\n"


OPEN_KEYWORDS = frozenset(
    (
        *("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"),
        *("$ref", "allOf", "anyOf", "oneOf", "not", "if"),
    )
)
"""Keywords with which an object says itself, or somewhere else, which properties it may have."""


def closed(schema: Any) -> Any:
    """A schema whose objects have only the properties that they name, unless they say otherwise.

    Parts of `allOf` stay as they are: each names only some of the properties.
    """
    if not isinstance(schema, dict):
        return schema
    changed = dict(schema)
    for key in schema.keys() & {"properties", "$defs", "definitions"}:
        if isinstance(schema[key], dict):
            changed[key] = {name: closed(part) for name, part in schema[key].items()}
    for key in schema.keys() & {"anyOf", "oneOf", "prefixItems"}:
        if isinstance(schema[key], list):
            changed[key] = [closed(part) for part in schema[key]]
    for key in schema.keys() & {"items", "additionalProperties"}:
        changed[key] = closed(schema[key])
    named = schema.get("properties")
    if isinstance(named, dict) and not schema.keys() & OPEN_KEYWORDS:
        required = schema.get("required", ())
        if isinstance(required, list | tuple) and set(required) <= named.keys():
            changed["additionalProperties"] = False
    return changed


def _call_rules(form: CallForm, tool: Function, rule: str, special: Mapping[str, int]) -> list[str]:
    """Rules of one tool's calls. The first rule has the name `rule`."""
    if form.tags or form.python:
        return _argument_rules(form, tool, rule, special)
    schema = {**tool["parameters"], "x-guidance": COMPACT}
    return [
        f"{rule}: {_one_call(form, tool, f'{rule}_args', special)}",
        f"{rule}_args: %json {json.dumps(schema)}",
    ]


def _argument_rules(
    form: CallForm, tool: Function, rule: str, special: Mapping[str, int]
) -> list[str]:
    """Rules of arguments that are written one by one, in the schema's order."""
    if not lists_arguments(tool):
        raise InputError(
            "This model writes arguments one by one, so the parameters of the tool "
            f"{tool['name']!r} must be an object with `properties` that have all that is "
            "`required`."
        )
    required, call = tool["parameters"].get("required", ()), f"{tool['name']}("
    rules: list[str] = []
    parts: list[tuple[str, bool]] = []
    for i, key in enumerate(properties_of(tool["parameters"])):
        name = f"{rule}_arg_{i}"
        rules += _value_rules(form, tool, key, name, special)
        parts.append((name, key in required))
    if form.tags:
        body = " ".join(name if needed else f"{name}?" for name, needed in parts)
        opening = _marked(form.before + form.tags.opening(tool["name"]), special)
        return [
            f"{rule}: {opening} {body} {_marked(form.tags.close + form.after, special)}",
            *rules,
        ]
    return [f'{rule}: {_quoted(call)} {rule}_first_0 ")"', *_commas(rule, parts), *rules]


def _commas(rule: str, parts: Sequence[tuple[str, bool]]) -> list[str]:
    """Rules of comma-separated arguments, required and optional ones."""
    lines = [f'{rule}_first_{len(parts)}: ""', f'{rule}_next_{len(parts)}: ""']
    for i, (name, needed) in enumerate(parts):
        following, left_out = f"{rule}_next_{i + 1}", f"{rule}_first_{i + 1}"
        first, later = f"{name} {following}", f'", " {name} {following}'
        lines.append(f"{rule}_first_{i}: {first}" + ("" if needed else f" | {left_out}"))
        lines.append(f"{rule}_next_{i}: {later}" + ("" if needed else f" | {following}"))
    return lines


def lists_arguments(tool: Function) -> bool:
    """Whether the schema names every argument."""
    schema, listed = tool["parameters"], properties_of(tool["parameters"])
    open_ended = not listed and schema.keys() - EMPTY_OBJECT_KEYWORDS
    is_object = schema.get("type", "object") == "object"
    return is_object and not open_ended and set(schema.get("required", ())) <= set(listed)


def _value_rules(
    form: CallForm, tool: Function, key: str, name: str, special: Mapping[str, int]
) -> list[str]:
    """Rules of a single argument."""
    schema, root = properties_of(tool["parameters"])[key], tool["parameters"]
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    as_json = f"{name}_json: %json {json.dumps({**definitions, **schema, 'x-guidance': COMPACT})}"
    if not form.tags:
        return [f"{name}: {_quoted(f'{key}=')} {name}_json", as_json]
    before, after = (_marked(tag, special) for tag in (form.tags.before(key), form.tags.after))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values:
        one_of = " | ".join(f"{_quoted(as_text(value))}" for value in values)
        return [f"{name}: {before} ({one_of}) {after}"]
    if "string" not in types_of(schema, root):
        return [f"{name}: {before} {name}_json {after}", as_json]
    lazy = "" if form.tags.value_end in special else "[lazy]"
    return [f"{name}: {before} {name}_text", f"{name}_text{lazy}: TEXT {after}"]


def _one_call(form: CallForm, tool: Function, arguments: str, special: Mapping[str, int]) -> str:
    """Right side of the rule of one call."""
    if form.named:
        identifier = f"{_mark(form.identified, special)} ID" if form.identified else ""
        return f"{_quoted(tool['name'])} {identifier} {_mark(form.named, special)} {arguments}"
    opening = f'{{"name": {json.dumps(tool["name"])}, "{form.arguments}": '
    before, after = ("", "") if form.listed else (form.before, form.after)
    return f"{_quoted(before + opening)} {arguments} {_quoted('}' + after)}"


def _mark(mark: str, special: Mapping[str, int]) -> str:
    return f"<[{special[mark]}]>" if mark in special else _quoted(mark)


def _marked(text: str, special: Mapping[str, int]) -> str:
    """Grammar of a text that contains marks."""
    parts = re.split("|".join(f"({re.escape(mark)})" for mark in special) or r"(?!)", text)
    return " ".join(_mark(part, special) for part in parts if part)


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""
