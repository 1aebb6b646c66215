"""A grammar of the tool calls that a model may write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moaspec.data.call_forms import CALL_ID_LENGTH, CallForm
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
    form: CallForm,
    tools: Sequence[Tool],
    *,
    forced: bool,
    parallel: bool,
    special: Mapping[str, int],
) -> str:
    """A grammar, in llguidance's Lark, of texts whose calls are all well-formed.

    Args:
        form: how calls are written.
        tools: which may be called.
        forced: the text must be calls; else it may be anything, with calls in it.
        parallel: more than one call is allowed.
        special: tokens of the form's marks that are special ones.
    """
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
        lines += [f"head{lazy}: TEXT {trigger}", "rest: TEXT", r"TEXT: /(.|\n)*/"]
    lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        schema = {**tool.parameters, "x-guidance": COMPACT}
        lines.append(f"call_{i}: {_one_call(form, tool, f'args_{i}', special)}")
        lines.append(f"args_{i}: %json {json.dumps(schema)}")
    if form.identified:
        lines.append(f"ID: /[a-zA-Z0-9]{{{CALL_ID_LENGTH}}}/")
    return "%llguidance {}\n" + "\n".join(lines) + "\n"


def _one_call(form: CallForm, tool: Tool, arguments: str, special: Mapping[str, int]) -> str:
    """The right side of one call's rule."""
    if form.named:
        identifier = f"{_mark(form.identified, special)} ID" if form.identified else ""
        return f"{_quoted(tool.name)} {identifier} {_mark(form.named, special)} {arguments}"
    opening = f'{{"name": {json.dumps(tool.name)}, "{form.arguments}": '
    before, after = ("", "") if form.listed else (form.before, form.after)
    return f"{_quoted(before + opening)} {arguments} {_quoted('}' + after)}"


def _mark(mark: str, special: Mapping[str, int]) -> str:
    return f"<[{special[mark]}]>" if mark in special else _quoted(mark)


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""
