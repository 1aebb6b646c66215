"""Roles, call ids and fields that a chat template reads, found by rendering short conversations."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from moaspec_core.chat.call_forms import HERMES, CallForm, form_of
from moaspec_core.chat.messages import Message, normal_tool

Render = Callable[..., str | None]
"""Renders messages with the template's variables; None where the template refuses them."""

ToolsIn = Literal["tools", "xml_tools", "text message", "list message"]
"""Where a template reads tools: in a variable, or in `tools` of the system message."""

WORDS = ("probeone", "probetwo", "probethree")
RESULT = "proberesult"
NAMES = ("probe_a", "probe_b")
TOOLS = [
    normal_tool(
        {
            "name": name,
            "description": "Probes.",
            "parameters": {
                "type": "object",
                "properties": {"key": {"type": "string", "description": "A key."}},
                "required": ["key"],
            },
        }
    )
    for name in NAMES
]
SHORT_IDS = ("abcDEF123", "abcDEF124")
LONG_IDS = ("call_0123456789abcdef01", "call_0123456789abcdef02")
OTHER_ROLE = "probe_role"


def message_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Tools as a text in the system message: a list of functions."""
    return json.dumps([tool["function"] for tool in tools], ensure_ascii=False)


class TemplateTraits:
    """Traits of one chat template, each found when it is first needed.

    A template that refuses even a single question gets every trait, so that its own error is shown.

    Args:
        vocabulary: tokens that were added to the tokenizer's.
    """

    def __init__(self, render: Render, source: str, vocabulary: Sequence[str] = ()) -> None:
        self._render, self._source, self._vocabulary = render, source, vocabulary

    @cached_property
    def content_as_parts(self) -> bool:
        """Content must be a list of parts; a text is refused or left out."""
        if _contains(self._render([_message_of("user", WORDS[0])]), WORDS[0]):
            return False
        return _contains(self._render([_message_of("user", _parts(WORDS[0]))]), WORDS[0])

    @cached_property
    def takes_system(self) -> bool:
        """A first message may have the role `system`."""
        return self._refuses_all or _contains(self._shown("system", "user"), *WORDS[:2])

    @cached_property
    def takes_two_systems(self) -> bool:
        """So may the second one."""
        return self._refuses_all or _contains(self._shown("system", "system", "user"), *WORDS)

    @cached_property
    def takes_developer(self) -> bool:
        """The role `developer` is one of the template's own, not just any word for a role."""
        shown, other = self._shown("developer", "user"), self._shown(OTHER_ROLE, "user")
        generic = other is not None and shown == other.replace(OTHER_ROLE, "developer")
        return _contains(shown, *WORDS[:2]) and not generic

    @cached_property
    def alternates(self) -> bool:
        """Two messages of the user in a row are refused."""
        return not self._refuses_all and self._shown("user", "user") is None

    @cached_property
    def tools_in(self) -> ToolsIn | None:
        """Where tools are read; None: nowhere."""
        user, system = self._messages("user", "system")
        given: dict[ToolsIn, str | None] = {
            "tools": self._render([user], tools=TOOLS),
            "xml_tools": self._render([user], xml_tools=TOOLS),
            "text message": self._render([{**system, "tools": message_tools(TOOLS)}, user]),
            "list message": self._render([{**system, "tools": TOOLS}, user]),
        }
        if '\\"' in str(given["text message"]):
            del given["text message"]  # the template writes the text as JSON once more
        return next((place for place, text in given.items() if _contains(text, *NAMES)), None)

    @cached_property
    def writes_calls(self) -> bool:
        """Calls of an assistant's message are written."""
        shown = (self._calls(1, {"key": WORDS[2]}), self._calls(1, _AS_TEXT))
        return any(_contains(text, NAMES[0]) for text in shown)

    @cached_property
    def arguments_as_text(self) -> bool:
        """A call's arguments must be JSON text; an object is refused or written as Python does."""
        shown = self._calls(1, {"key": WORDS[2]})
        is_json = self._written({"key": WORDS[2]}) and "{'key'" not in str(shown)
        return not is_json and self._written(_AS_TEXT)

    @cached_property
    def takes_parallel_calls(self) -> bool:
        """A message may have several calls."""
        return not self.writes_calls or _contains(self._calls(2, self._arguments), *NAMES)

    @cached_property
    def takes_any_call_id(self) -> bool:
        """Call ids may have any form; else nine letters or digits."""
        short, long = (
            self._calls(1, self._arguments, ids=ids, answered=True) for ids in (SHORT_IDS, LONG_IDS)
        )
        return long is not None or short is None

    @cached_property
    def takes_tool_role(self) -> bool:
        """Results are messages of the role `tool`.

        A template that knows no tools may write any role; its model has not seen this one.
        """
        if self.writes_calls:
            shown = self._calls(1, self._arguments, answered=True)
        else:
            shown = self._render([*self._messages("user", "assistant"), self._result(SHORT_IDS[0])])
        return self.tools_in is not None and _contains(shown, RESULT)

    @cached_property
    def form(self) -> CallForm:
        """How the model writes calls."""
        return HERMES if self.tools_in is None else form_of(self._source, self._vocabulary)

    @cached_property
    def _refuses_all(self) -> bool:
        return self._shown("user") is None

    @property
    def _arguments(self) -> Any:
        return _AS_TEXT if self.arguments_as_text else {"key": WORDS[2]}

    def _shown(self, *roles: str) -> str | None:
        return self._render(self._messages(*roles))

    def _messages(self, *roles: str) -> list[Message]:
        return [
            self.shaped(_message_of(role, text)) for role, text in zip(roles, WORDS, strict=False)
        ]

    def shaped(self, message: Message) -> Message:
        """The message with its content as the template wants it."""
        if not self.content_as_parts:
            return message
        return {**message, "content": _parts(message["content"])}

    def _result(self, identifier: str) -> Message:
        return {**self.shaped(_message_of("tool", RESULT)), "tool_call_id": identifier}

    def _written(self, arguments: Any) -> bool:
        return _contains(self._calls(1, arguments), NAMES[0], WORDS[2])

    def _calls(
        self, count: int, arguments: Any, *, ids: Sequence[str] = SHORT_IDS, answered: bool = False
    ) -> str | None:
        """Render a question, `count` calls, and with `answered` the first call's result."""
        calls = [
            {"id": one, "type": "function", "function": {"name": name, "arguments": arguments}}
            for one, name in list(zip(ids, NAMES, strict=True))[:count]
        ]
        messages = self._messages("user")
        messages.append({**self.shaped(_message_of("assistant", "")), "tool_calls": calls})
        if answered:
            messages.append(self._result(ids[0]))
        return self._render(messages)


_AS_TEXT = json.dumps({"key": WORDS[2]})


def _message_of(role: str, content: Any) -> Message:
    return {"role": role, "content": content}


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _contains(text: str | None, *words: str) -> bool:
    return text is not None and all(word in text for word in words)
