"""The only path from messages to token ids; training, regenerating and serving use it.

Messages of the normal form (`moaspec_core.chat.messages`) are first adapted to the template.
`TemplateTraits` finds out which roles, call ids and fields the template takes.
"""

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2.exceptions import TemplateError

from moaspec_core.chat.argument_types import as_text
from moaspec_core.chat.call_forms import HERMES, CallForm, short_call_id
from moaspec_core.chat.control_tokens import ControlTokens
from moaspec_core.chat.messages import Message
from moaspec_core.chat.template_traits import TemplateTraits, message_tools
from moaspec_core.errors import InputError

GUARDED_ROLES = ("user", "tool")  # control tokens in their messages are encoded as text

INTRODUCTION = """\
You can call functions. These exist, each described as JSON:
{functions}
To call one, write nothing but
<tool_call>
{{"name": "the function's name", "arguments": {{...}}}}
</tool_call>"""

RENDER_VARIABLES = ("self", "messages", "conversations", "generation_indices")
"""Names that transformers gives to templates itself, beside its own parameters."""

FAILURES = (
    *(TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(NameError, RuntimeError),  # of code that jinja2 makes, and of recursion
)
"""Errors of a template that meets something unexpected."""


@dataclass(frozen=True, kw_only=True)
class PreparedMessages:
    """A conversation as one template takes it."""

    messages: tuple[Message, ...]  # in the template's own form
    # Further variables of the template; tools are among them where it reads them.
    variables: Mapping[str, Any]
    source: str


class ChatTemplate:
    """Renders conversations in the chat template of transformers' tokenizer, if there is one."""

    def __init__(self, tokenizer: Any, name: str = "the target") -> None:
        self.tokenizer: Any = tokenizer
        self.name = name

    @property
    def exists(self) -> bool:
        return self.tokenizer is not None and bool(self.tokenizer.chat_template)

    @property
    def source(self) -> str:
        """Its text; "" where there is none. With tools there may be another."""
        return self._source(tools=True) if self.exists else ""

    @cached_property
    def traits(self) -> TemplateTraits:
        """Of the template that is used with tools, if there are several."""
        source = self.source

        def render(messages: Sequence[Message], **variables: Any) -> str | None:
            try:
                return self._text(messages, source, variables)
            except FAILURES:
                return None

        return TemplateTraits(render, source, tuple(self.tokenizer.get_added_vocab()))

    @cached_property
    def control_tokens(self) -> ControlTokens:
        return ControlTokens(self.tokenizer)

    @property
    def form(self) -> CallForm:
        """How the model writes calls."""
        return self.traits.form if self.exists else HERMES

    @cached_property
    def special_marks(self) -> dict[str, int]:
        """Token ids of the marks of tool calls that are special tokens."""
        special = getattr(self.tokenizer, "all_special_tokens", ())
        marks = [mark for mark in self.form.marks if mark in special]
        return {mark: int(self.tokenizer.convert_tokens_to_ids(mark)) for mark in marks}

    def rendered(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The text of a conversation, which `tokenize` takes.

        Args:
            messages: of the normal form.
            tools: what the model may call, of the normal form.
            variables: further ones of the template.
            add_generation_prompt: end where the assistant's next turn begins.
            continue_final_message: end within the last message, which is to be continued.

        Raises:
            InputError: no template, a refused conversation, a last message of calls that is to be
                continued, or a variable with the name of one of transformers' own arguments.
        """
        if continue_final_message and messages[-1].get("tool_calls"):
            raise InputError(
                "continue_final_message goes on with a text, and the last message has tool calls. "
                "Leave these out, or give their results."
            )
        return self.text(
            self.prepare(messages, tools, variables),
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
        )

    def prepare(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> PreparedMessages:
        """The conversation as this template takes it; for arguments and errors see `rendered`."""
        if not self.exists:
            raise InputError(
                f"{self.name} has no chat template, so it cannot read messages. Give it token "
                "ids or plain prompts."
            )
        self.check_variables(variables or {})
        with_tools = bool(tools) or any(
            message.get("tool_calls") or message["role"] == "tool" for message in messages
        )
        found = list(_standard_roles(map(self._guarded, messages), self.traits))
        if with_tools:
            found = self._with_calls(found)
        found, given = self._with_tools(found, tools)
        found = self._with_systems(found)
        return PreparedMessages(
            messages=tuple(map(self.traits.shaped, found)),
            variables={**given, **(variables or {})},
            source=self._source(tools=with_tools),
        )

    def text(self, prepared: PreparedMessages, stop: int | None = None, **how: bool) -> str:
        """Render the first `stop` messages, or all.

        Args:
            **how: `add_generation_prompt` and `continue_final_message`.

        Raises:
            InputError: the template refuses them.
        """
        messages = prepared.messages[:stop]
        try:
            return self._text(messages, prepared.source, {**prepared.variables, **how})
        except FAILURES as error:
            roles = ", ".join(message["role"] for message in messages)
            raise InputError(
                f"The chat template of {self.name} refuses these messages ({roles}): {error}"
            ) from error

    def marked_ids(self, prepared: PreparedMessages) -> tuple[list[int], list[int]]:
        """Token ids of a template with `{% generation %}` marks, and the marks."""
        encoded = self.tokenizer.apply_chat_template(
            list(prepared.messages),
            chat_template=prepared.source,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **prepared.variables,
        )
        return encoded["input_ids"], encoded["assistant_masks"]

    def tokenize(self, text: str) -> list[int]:
        """Tokens of rendered text; the template has written all special tokens itself."""
        require_characters(text)
        try:
            return self.control_tokens.ids(text)
        except (ValueError, TypeError) as error:
            raise InputError(f"The tokenizer of {self.name} refuses the text: {error}") from error

    def check_variables(self, variables: Mapping[str, Any]) -> None:
        """Refuse names of transformers' own arguments, such as `chat_template`."""
        taken = (
            inspect.signature(self.tokenizer.apply_chat_template).parameters if variables else {}
        )
        for name in variables:
            if name in taken or name in RENDER_VARIABLES:
                raise InputError(f"{name!r} is not a variable of a chat template that may be set.")

    def _guarded(self, message: Message) -> Message:
        """A message whose control tokens are encoded as text."""
        if message["role"] not in GUARDED_ROLES:
            return message
        return {**message, "content": self.control_tokens.guard(message["content"])}

    def _source(self, *, tools: bool) -> str:
        named = self.tokenizer.chat_template
        if isinstance(named, Mapping) and not named.keys() & (
            {"default", "tool_use"} if tools else {"default"}
        ):
            raise InputError(
                f"{self.name} has chat templates named {', '.join(sorted(named))}, and none named "
                "'default', so it cannot read messages. Give one of them that name, in the "
                "model's tokenizer_config.json or among its files, or give token ids or plain "
                "prompts (/v1/completions)."
            )
        return str(self.tokenizer.get_chat_template(tools=[] if tools else None))

    def _text(self, messages: Sequence[Message], source: str, variables: Mapping[str, Any]) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                list(messages), chat_template=source, tokenize=False, **variables
            )
        )

    def _with_calls(self, messages: list[Message]) -> list[Message]:
        """Calls and their results as the template takes them."""
        traits = self.traits
        if not traits.takes_parallel_calls:
            messages = list(_one_call_each(messages))
        if not traits.takes_any_call_id:
            messages = [_with_short_ids(message) for message in messages]
        if not traits.writes_calls:
            messages = [_calls_as_text(message, traits.form) for message in messages]
        elif traits.arguments_as_text:
            messages = [_arguments_as_text(message) for message in messages]
        if not traits.takes_tool_role:
            messages = _results_as_text(messages, alternate=traits.alternates)
        return messages

    def _with_tools(
        self, messages: list[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Message], dict[str, Any]]:
        """Tools where the template reads them, else in the system message."""
        place = self.traits.tools_in if tools else "tools"
        if place in ("tools", "xml_tools"):
            return messages, {place: list(tools)} if tools else {}
        system = messages[0] if messages and messages[0]["role"] == "system" else None
        rest = messages if system is None else messages[1:]
        system = system or {"role": "system", "content": ""}
        if place is None:
            functions = "\n".join(json.dumps(tool["function"]) for tool in tools)
            told = INTRODUCTION.format(functions=functions)
            system = {**system, "content": f"{system['content']}\n\n{told}".strip()}
        else:
            given = message_tools(tools) if place == "text message" else list(tools)
            system = {**system, "tools": given}
        return [system, *rest], {}

    def _with_systems(self, messages: list[Message]) -> list[Message]:
        """System messages at the start as the template takes them."""
        count = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
        if count > 1 and not self.traits.takes_two_systems:
            merged = {**messages[0], "content": _paragraphs(messages[:count])}
            messages, count = [merged, *messages[count:]], 1
        if count and not self.traits.takes_system and messages[count:]:
            first = messages[count]
            if first["role"] == "user":
                told = {**first, "content": _paragraphs(messages[: count + 1])}
                return [told, *messages[count + 1 :]]
        return messages


def _paragraphs(messages: Sequence[Message]) -> str:
    return "\n\n".join(text for message in messages if (text := message["content"]))


def _standard_roles(messages: Iterable[Message], traits: TemplateTraits) -> Iterator[Message]:
    """`developer` is OpenAI's newer name for `system`."""
    for message in messages:
        if message["role"] == "developer" and not traits.takes_developer:
            yield {**message, "role": "system"}
        else:
            yield message


def _one_call_each(messages: Sequence[Message]) -> Iterator[Message]:
    """A message of several calls as one for each call, with its result behind it."""
    i = 0
    while i < len(messages):
        message, calls = messages[i], messages[i].get("tool_calls", ())
        i += 1
        if len(calls) < 2:
            yield message
            continue
        results = []
        while i < len(messages) and messages[i]["role"] == "tool":
            results.append(messages[i])
            i += 1
        for number, call in enumerate(calls):
            content = "" if number else message["content"]
            yield {**message, "content": content, "tool_calls": [call]}
            yield from (result for result in results if result.get("tool_call_id") == call["id"])
        known = {call["id"] for call in calls}
        yield from (result for result in results if result.get("tool_call_id") not in known)


def _with_short_ids(message: Message) -> Message:
    if message.get("tool_calls"):
        calls = [{**call, "id": short_call_id(call["id"])} for call in message["tool_calls"]]
        return {**message, "tool_calls": calls}
    if message.get("tool_call_id"):
        return {**message, "tool_call_id": short_call_id(message["tool_call_id"])}
    return message


def _arguments_as_text(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = as_text(call["function"]["arguments"])
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _calls_as_text(message: Message, form: CallForm) -> Message:
    if not message.get("tool_calls"):
        return message
    texts = [message["content"], form.written(message["tool_calls"])]
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**others, "content": "\n".join(text for text in texts if text)}


def _results_as_text(messages: Sequence[Message], *, alternate: bool) -> list[Message]:
    """Results as messages of the user; with `alternate`, one message with those beside them."""
    found: list[Message] = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            message = {"role": "user", "content": text}
        beside = is_result or after_result
        if alternate and beside and found and found[-1]["role"] == message["role"] == "user":
            text = f"{found[-1]['content']}\n{message['content']}"
            message = {**message, "content": text}
            found.pop()
        found.append(message)
        after_result = is_result
    return found


def require_characters(text: str) -> None:
    """Refuse a text that no tokenizer takes. InputError: it holds a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"The text is not valid UTF-8: character {error.start} is half of a surrogate pair."
        ) from error
