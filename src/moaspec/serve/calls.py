"""Tool calls as models write them: which form, a grammar of it, and reading it back.

The forms are those of the chat templates that name them: Hermes (also Qwen), Llama 3 and Mistral. A
template that knows no tools is told of them in a system message, in the form of Hermes.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moaspec.decode.grammar import COMPACT
from moaspec.serve.text import begun


@dataclass(frozen=True)
class CallForm:
    """How a model writes calls.

    Attributes:
        trigger: what begins a call (or, with `listed`, all of them); "" where calls are bare JSON.
        before, after: what surrounds a call's JSON.
        arguments: the key of the arguments.
        listed: whether all calls are one JSON list.
    """

    trigger: str
    before: str = ""
    after: str = ""
    arguments: str = "arguments"
    listed: bool = False


HERMES = CallForm("<tool_call>", "\n", "\n</tool_call>")
LLAMA = CallForm("", arguments="parameters")
BETWEEN = " \n;"
"""What may stand between its calls."""
MISTRAL = CallForm("[TOOL_CALLS]", "[", "]", listed=True)


def form_of(template: str) -> CallForm:
    """The form that a chat template asks for."""
    if MISTRAL.trigger in template:
        return MISTRAL
    if HERMES.trigger not in template and '"parameters"' in template:
        return LLAMA
    return HERMES


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """As chat templates expect it."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }


@dataclass(frozen=True)
class Call:
    """A call that the model made; `arguments` is JSON text."""

    name: str
    arguments: str
    id: str


def call_grammar(
    form: CallForm, tools: Sequence[Tool], *, forced: bool, parallel: bool, trigger_id: int | None
) -> str:
    """A grammar, in llguidance's Lark, of texts whose calls are all well-formed.

    Args:
        form: how calls are written.
        tools: which may be called.
        forced: the text must be calls; else it may be anything, with calls in it.
        parallel: more than one call is allowed.
        trigger_id: the trigger's token, where it is a special one.
    """
    trigger = f"<[{trigger_id}]>" if trigger_id is not None else _quoted(form.trigger)
    joint = _quoted(", " if form.listed else "\n")
    calls = f"call ({joint} {'' if form.listed else trigger} call)*" if parallel else "call"
    body = f"{_quoted(form.before)} {calls} {_quoted(form.after)}" if form.listed else calls
    if forced:
        lines = [f"start: {trigger} {body}"]
    else:
        head = f"head[lazy]: TEXT {trigger}" if trigger_id is None else f"head: TEXT {trigger}"
        lines = [f"start: {'(head call)*' if parallel else '(head call)?'} rest"]
        lines = [f"start: (head {body})? rest"] if form.listed else lines
        lines += [head, "rest: TEXT", r"TEXT: /(.|\n)*/"]
    lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        opening = f'{{"name": {json.dumps(tool.name)}, "{form.arguments}": '
        before, after = ("", "") if form.listed else (form.before, form.after)
        schema = {**tool.parameters, "x-guidance": COMPACT}
        lines.append(f"call_{i}: {_quoted(before + opening)} args_{i} {_quoted('}' + after)}")
        lines.append(f"args_{i}: %json {json.dumps(schema)}")
    return "%llguidance {}\n" + "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""


class CallReader:
    """Splits text into what is said and what is called, as it grows.

    Args:
        form: how calls are written.
        names: of the functions that exist; calls of others are taken for text.
    """

    def __init__(self, form: CallForm, names: Sequence[str]) -> None:
        self._form, self._names = form, frozenset(names)
        self._buffer = ""
        self._calling = self._talking = False
        self.calls: list[Call] = []

    def feed(self, text: str, *, last: bool) -> tuple[str, list[Call]]:
        """Take in more text; what is certain to be said, and calls that are complete.

        Args:
            text: what follows the text before.
            last: nothing comes after it.
        """
        self._buffer += text
        known, said = len(self.calls), ""
        if not self._form.trigger:
            said = self._bare(last)
        else:
            while (part := self._next(last)) is not None:
                said += part
        return said, self.calls[known:]

    def _bare(self, last: bool) -> str:
        """What does not begin with a call has none."""
        if not self._talking and self._buffer.lstrip()[:1] in ("", "{"):
            if not last:
                return ""
            self._take_bare_calls()
        self._talking = True
        said = self._take(len(self._buffer))
        return said if said.strip(BETWEEN) or not self.calls else ""

    def _take_bare_calls(self) -> None:
        """Calls one after another, as far as they are whole."""
        while True:
            start = len(self._buffer) - len(self._buffer.lstrip(BETWEEN))
            try:
                value, end = json.JSONDecoder().raw_decode(self._buffer, start)
            except (ValueError, RecursionError):
                return
            call = self._call(value)
            if call is None:
                return
            self.calls.append(call)
            self._take(end)

    def _next(self, last: bool) -> str | None:
        """What is said in the next stretch; None when the buffer holds nothing certain."""
        if self._calling:
            return self._finish_call(last)
        trigger = self._form.trigger
        place = self._buffer.find(trigger)
        if place >= 0:
            self._calling = True
            said = self._take(place)
            self._take(len(trigger))
            return said.rstrip() if said.isspace() else said
        held = 0 if last else begun(self._buffer, [trigger])
        if self.calls and not last and not self._buffer[: len(self._buffer) - held].strip():
            return None
        said = self._take(len(self._buffer) - held)
        return (said if said.strip() or not self.calls else "") or None

    def _finish_call(self, last: bool) -> str | None:
        """Calls end with their mark, or with the text."""
        end = "" if self._form.listed else self._form.after.strip()
        place = self._buffer.find(end) if end else -1
        if place < 0 and not last:
            return None
        text = self._take(place if place >= 0 else len(self._buffer))
        self._take(len(end) if place >= 0 else 0)
        self._calling = False
        parts = _list(text) if self._form.listed else [text]
        calls = [self._call(part) for part in parts]
        if None in calls or not calls:
            return self._form.trigger + text + (end if place >= 0 else "")
        self.calls += [call for call in calls if call is not None]
        return ""

    def _call(self, text: Any) -> Call | None:
        """A call, if that is what it is."""
        try:
            value = json.loads(text) if isinstance(text, str) else text
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or value.get("name") not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        said = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return Call(value["name"], said, f"call_{secrets.token_hex(12)}")

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        return taken


def _list(text: str) -> list[Any]:
    """The elements of a JSON list; the text itself where it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return [text]
    return value if isinstance(value, list) else [value]
