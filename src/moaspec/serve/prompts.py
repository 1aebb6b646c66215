"""From messages to token ids, in the target's chat template."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from moaspec.errors import InputError
from moaspec.serve.calls import HERMES, CallForm, Tool, form_of
from moaspec.serve.failures import RequestError
from moaspec.serve.source import SourceFacts

Message = Mapping[str, Any]
"""As chat templates read it: role, content (text), tool_calls (with arguments as text), ..."""

INTRODUCTION = """\
You can call functions. These exist, each described as JSON:
{functions}
To call one, write nothing but
<tool_call>
{{"name": "the function's name", "arguments": {{...}}}}
</tool_call>"""


_RENDERERS = ("self", "messages", "conversations", "generation_indices")
"""Names that transformers gives to templates itself, beside its own parameters."""


class ChatPrompt:
    """Renders conversations for one target.

    Args:
        facts: of the target.
    """

    def __init__(self, facts: SourceFacts) -> None:
        self._facts = facts
        tokenizer = facts.tokenizer
        has_any = tokenizer is not None and bool(tokenizer.chat_template)
        self._template: str = tokenizer.get_chat_template(tools=[]) if has_any else ""
        self._knows_tools = "tools" in self._template
        self.form: CallForm = form_of(self._template) if self._knows_tools else HERMES

    def ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Token ids up to where the answer begins.

        Args:
            messages: the conversation.
            tools: what the model may call.
            variables: further ones of the template, from the client.

        Raises:
            InputError: no chat template, or one that refuses the conversation.
            RequestError: a variable that is none of the template's own.
        """
        if not self._template:
            raise InputError(
                f"{self._facts.name} has no chat template, so it holds no conversation; use "
                "/v1/completions."
            )
        extra = self._checked(variables or {})
        if self._knows_tools:
            messages = [_with_parsed_calls(message) for message in messages]
            extra["tools"] = [tool.as_json() for tool in tools] or None
        else:
            messages = _introduced([_as_text(message) for message in messages], tools)
        try:
            encoded = self._facts.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, return_dict=True, **extra
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise InputError(
                f"The chat template of {self._facts.name} refuses this conversation: {error}"
            ) from error
        return tuple(encoded["input_ids"])

    def _checked(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Only what a template is given: never what says how, or with which template, to render."""
        taken = inspect.signature(self._facts.tokenizer.apply_chat_template).parameters
        for name in variables:
            if name in taken or name in _RENDERERS:
                raise RequestError(
                    f"{name!r} is no variable of a chat template that a request may set.",
                    param="chat_template_kwargs",
                )
        return dict(variables)


def _with_parsed_calls(message: Message) -> Message:
    """Templates write arguments as JSON themselves, so they want them parsed."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _parsed(call["function"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _parsed(function: Mapping[str, Any]) -> Any:
    try:
        return json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return function["arguments"]


def _as_text(message: Message) -> Message:
    """Calls and their results as text, for a template that knows neither."""
    if message["role"] == "tool":
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": text}
    calls = [
        f"<tool_call>\n{json.dumps({'name': one['name'], 'arguments': _parsed(one)})}\n</tool_call>"
        for one in (call["function"] for call in message.get("tool_calls") or ())
    ]
    return {"role": message["role"], "content": "\n".join([message["content"] or "", *calls])}


def _introduced(messages: list[Message], tools: Sequence[Tool]) -> list[Message]:
    """Functions are described in the system message."""
    if not tools:
        return messages
    functions = "\n".join(json.dumps(tool.as_json()["function"]) for tool in tools)
    text = INTRODUCTION.format(functions=functions)
    if messages and messages[0]["role"] == "system":
        text = f"{messages[0]['content']}\n\n{text}"
        messages = messages[1:]
    return [{"role": "system", "content": text}, *messages]
