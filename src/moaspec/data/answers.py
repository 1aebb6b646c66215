"""Parsing generated tokens into an assistant message with tool calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from moaspec.data.messages import Message
from moaspec.data.templates.call_reader import CallReader
from moaspec.data.templates.chat_template import ChatTemplate


def read_answer(
    template: ChatTemplate,
    token_ids: Sequence[int],
    tools: Sequence[Mapping[str, Any]],
    stop_token_ids: Collection[int],
) -> Message:
    """An assistant's message, with the calls in it; they have no ids yet.

    Args:
        template: of the target.
        token_ids: that the target wrote.
        tools: that it was told of, of the normal form.
        stop_token_ids: ids that end a turn; they are no text.
    """
    tokenizer: Any = template.tokenizer
    if not tools:
        text = tokenizer.decode(token_ids, skip_special_tokens=True)
        return {"role": "assistant", "content": text}
    said = [token for token in token_ids if token not in stop_token_ids]
    # Marks that are special tokens must be seen.
    text = tokenizer.decode(said, skip_special_tokens=not template.special_marks)
    functions = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    reader = CallReader(template.form, functions)
    content, calls = reader.feed(text, last=True)
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {k: v for k, v in call.as_json().items() if k != "id"} for call in calls
        ]
    return message
