"""Prompts of a command line as text and as token ids."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from moaspec_core.errors import InputError

if TYPE_CHECKING:
    from moaspec_core.engine.device_target import DeviceTarget


def read_prompt(prompt: str | None) -> str:
    """The prompt, of standard input if it is "-" or piped; InputError where it is blank."""
    if prompt is None and sys.stdin.isatty():
        raise InputError("There is no prompt; write one, or pipe one in.")
    if prompt is None or prompt == "-":
        prompt = _standard_input(sys.stdin)
    if not prompt.strip():
        raise InputError("The prompt is empty; write what the model should answer.")
    return prompt


def read_as_utf8(stdin: TextIO) -> None:
    """Let standard input be read as UTF-8, with a byte order mark or without.

    On Windows pipes have another encoding, in the C locale every byte is taken.
    """
    if isinstance(stdin, io.TextIOWrapper):
        stdin.reconfigure(encoding="utf-8-sig", errors="strict")


def _standard_input(stdin: TextIO) -> str:
    read_as_utf8(stdin)
    try:
        return stdin.read().rstrip("\n")
    except UnicodeError as error:
        raise InputError("Standard input is not valid UTF-8 text.") from error


def chat_ids(
    target: DeviceTarget, prompt: str, *, system: str | None = None, raw: bool = False
) -> list[int]:
    """Token ids of a user's prompt; see `message_ids`."""
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return message_ids(target, messages, raw=raw)


def message_ids(
    target: DeviceTarget, messages: Sequence[Mapping[str, str]], *, raw: bool = False
) -> list[int]:
    """Token ids of a conversation, up to where the answer begins.

    They follow the target's chat template where it has one, unless `raw`.

    Raises:
        InputError: the target has no tokenizer, or a conversation that its template refuses.
    """
    tokenizer: Any = target.tokenizer
    if tokenizer is None:
        raise InputError(f"The target {target.name} has no tokenizer, so it cannot read text.")
    if raw or not tokenizer.chat_template:
        from moaspec_core.chat.chat_template import require_characters

        text = "\n".join(message["content"] for message in messages)
        require_characters(text)
        return list(tokenizer(text)["input_ids"])
    return conversation_ids(target, messages)


def conversation_ids(target: DeviceTarget, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a conversation, up to the next answer; InputError if its template refuses."""
    from moaspec_core.chat.chat_template import ChatTemplate

    template = ChatTemplate(target.tokenizer, target.name)
    if not template.exists:
        raise InputError(
            f"The target {target.name} has no chat template, so it holds no conversation; give one "
            "with --chat-template, or use `moaspec generate`."
        )
    return template.tokenize(template.rendered([dict(message) for message in messages]))
