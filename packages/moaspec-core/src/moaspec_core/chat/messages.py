"""The normal form of messages and tools, which is OpenAI's, and conversion of other forms to it."""

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Message = dict[str, Any]
"""`role`, `content` (a text), `tool_calls`, `tool_call_id`, and what else a chat template reads.

A call is `{"id", "type": "function", "function": {"name", "arguments"}}`. `arguments` is an object;
it stays a text only where the text is no JSON object.
"""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of one key, which transformers hands to templates under all of them."""
WORD = re.compile(r"\w+")
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class MalformedError(ValueError):
    """A message or tool that has no normal form; callers add where it stands."""


def normal_messages(messages: Sequence[Any]) -> tuple[Message, ...]:
    """Messages in the normal form.

    Calls without an id get one, and a result without `tool_call_id` belongs to the first call that
    has no result yet. Results get the `name` of the called function, which some templates read.
    The deprecated `function_call` and role `function` become `tool_calls` and role `tool`.

    Raises:
        MalformedError: a message without role or text, or a call without name.
    """
    return tuple(_with_ids(_message(message, i) for i, message in enumerate(messages, start=1)))


def normal_tool(tool: Any) -> dict[str, Any]:
    """A tool in OpenAI's form; a bare function is wrapped, and absent fields are filled in.

    Raises:
        MalformedError: something that is no function.
    """
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise MalformedError(
            f"a tool must be a function: an object with 'name', got {short(tool)}."
        )
    function = tool.get("function", {key: tool[key] for key in tool if key != "type"})
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise MalformedError(f"a tool must have a 'name', got {short(tool)}.")
    described = {
        "name": name,
        "description": function.get("description") or "",
        "parameters": function.get("parameters") or NO_PARAMETERS,
    }
    others = {key: function[key] for key in function if key not in {*described, "strict"}}
    return {"type": "function", "function": {**described, **others}}


def short(value: Any) -> str:
    """A value as messages of errors quote it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def words(text: str) -> tuple[str, ...]:
    """A text's words, normalised in case, punctuation and typographic variants."""
    return tuple(WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def _part_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        raise MalformedError(
            f"parts other than text cannot be read, got {short(part)}. Leave such rows out."
        )
    return text


def _message(message: Any, number: int) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise MalformedError(
            f"message {number} must be an object with 'role', got {short(message)}."
        )
    try:
        calls = [_call(call) for call in _given_calls(message)]
        content = message.get("content")
        if isinstance(content, list):
            # Chat templates write parts without anything between them too.
            content = "".join(map(_part_text, content))
    except MalformedError as error:
        raise MalformedError(f"message {number}: {error}") from error
    reasons = message["role"] == "assistant" and any(map(message.get, REASONING))
    if content is None and (calls or reasons):
        content = ""
    if not isinstance(content, str):
        raise MalformedError(f"message {number} must have a text 'content', got {short(message)}.")
    role = "tool" if message["role"] == "function" else message["role"]
    others = {
        key: value
        for key, value in message.items()
        if key not in ("tool_calls", "function_call") and value is not None
    }
    return {**others, "role": role, "content": content, **({"tool_calls": calls} if calls else {})}


def _given_calls(message: Mapping[str, Any]) -> list[Any]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise MalformedError(f"'tool_calls' must be a list, got {short(calls)}.")
    return [*calls, *([message["function_call"]] if message.get("function_call") else [])]


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name or not isinstance(function, Mapping):
        raise MalformedError(f"a call must have the 'name' of a function, got {short(call)}.")
    arguments = parsed_arguments(function.get("arguments", function.get("parameters")))
    identifier = call.get("id") if isinstance(call.get("id"), str) else ""
    return {
        "id": identifier,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def parsed_arguments(arguments: Any) -> Any:
    """A call's arguments as an object; a text that is no JSON object stays as it is."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _with_ids(messages: Iterable[Message]) -> Iterable[Message]:
    waiting: list[str] = []
    names: dict[str, str] = {}
    count = 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            calls.append({**call, "id": call["id"] or f"call{count:05d}"})
            count += 1
        waiting += [call["id"] for call in calls]
        names |= {call["id"]: call["function"]["name"] for call in calls}
        if message["role"] == "tool":
            answered = message.get("tool_call_id") or (waiting[0] if waiting else None)
            if answered in waiting:
                waiting.remove(answered)
            name = {"name": names[answered]} if answered in names else {}
            yield message if answered is None else {**name, **message, "tool_call_id": answered}
        else:
            yield {**message, "tool_calls": calls} if calls else message
