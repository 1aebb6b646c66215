"""A grammar of the tool calls that a model may write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moaspec.data.call_forms import CallForm
from moaspec.data.messages import normal_tool
from moaspec.decode.grammar import COMPACT


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        given: as the client described it, of the normal form.
    """

    given: Mapping[str, Any]

    @classmethod
    def of(cls, function: Mapping[str, Any]) -> Tool:
        """A tool from a function's `name`, `description` and `parameters`."""
        return cls(normal_tool(function))

    @property
    def name(self) -> str:
        """How it is called."""
        return str(self.given["function"]["name"])

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of its arguments."""
        found: Mapping[str, Any] = self.given["function"]["parameters"]
        return found


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
