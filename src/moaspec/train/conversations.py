"""Conversations in the shapes that public data sets come in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moaspec.errors import DataError
from moaspec.train.sources import OnMalformed, Record, read_records, refuse

Message = Mapping[str, Any]
"""`role`, `content`, and whatever else a chat template reads (`tool_calls`, `name` ...)."""

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "function_call": "assistant",
    "function_response": "tool",
    "observation": "tool",
}


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One row of data.

    Attributes:
        where: its place, for messages.
        name: the row's own `id`, or "".
        messages: the conversation; empty where only token ids are given.
        tools: tool descriptions for the chat template.
        plain: a single text, which also makes sense without a chat template.
        prompt_ids, response_ids: token ids, where the row has them.
    """

    where: str
    name: str = ""
    messages: tuple[Message, ...] = ()
    tools: tuple[Any, ...] = ()
    plain: bool = False
    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[int, ...] | None = None


def read_conversations(
    sources: Iterable[str], on_malformed: OnMalformed = refuse
) -> Iterator[Conversation]:
    """Conversations of all sources, in order.

    The shapes, by the first of these keys that a row has: `prompt_ids` (with `response_ids`, and
    `messages` beside them), `messages` (OpenAI), `conversations` (ShareGPT), `turns` (user turns,
    as in MT-bench), `instruction` (with `input` and `output`), `prompt` (with `response`).

    Args:
        sources: see `read_records`.
        on_malformed: called with a message that names file and line for each malformed row.

    Raises:
        DataError: a source cannot be read; or whatever `on_malformed` raises.
    """
    for source in sources:
        for record in read_records(source, on_malformed):
            try:
                yield parse(record)
            except DataError as error:
                on_malformed(error)


def parse(record: Record) -> Conversation:
    """Read one row.

    Raises:
        DataError: no known shape, or something of the wrong type in it.
    """
    row = record.value
    for key, reader in _SHAPES.items():
        if row.get(key) is not None:
            try:
                fields = reader(row)
            except _Malformed as error:
                raise DataError(f"{record.where}: {error}") from error
            identifier = row.get("id")
            name = identifier if isinstance(identifier, str) else ""
            return Conversation(where=record.where, name=name, **fields)
    raise DataError(
        f"{record.where}: none of the keys {', '.join(_SHAPES)}; the row has "
        f"{', '.join(map(str, row)) or 'no keys'}."
    )


class _Malformed(Exception):  # noqa: N818 - never leaves this module
    """What is wrong with a row; `parse` says where."""


_Fields = dict[str, Any]


def _ids(row: Mapping[str, Any]) -> _Fields:
    fields = _messages(row) if row.get("messages") else {}
    fields["prompt_ids"] = _token_ids(row["prompt_ids"], "prompt_ids")
    if not fields["prompt_ids"]:
        raise _Malformed("'prompt_ids' is empty; a response needs something before it.")
    if row.get("response_ids") is not None:
        fields["response_ids"] = _token_ids(row["response_ids"], "response_ids")
    return fields


def _token_ids(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        raise _Malformed(f"{name!r} must be a list of integers, got {_short(value)}.")
    return tuple(value)


def _messages(row: Mapping[str, Any]) -> _Fields:
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise _Malformed(f"'messages' must be a list of messages, got {_short(messages)}.")
    tools = row.get("tools") or []
    if not isinstance(tools, list):
        raise _Malformed(f"'tools' must be a list, got {_short(tools)}.")
    checked = tuple(_message(message, number) for number, message in enumerate(messages, start=1))
    return {"messages": checked, "tools": tuple(tools)}


def _message(message: Any, number: int) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _Malformed(f"message {number} must be an object with 'role', got {_short(message)}.")
    content = message.get("content")
    if isinstance(content, list):
        content = _joined(content, number)
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise _Malformed(f"message {number} must have a text 'content', got {_short(message)}.")
    return {**message, "content": content}


def _joined(parts: list[Any], number: int) -> str:
    """OpenAI's content parts as one text."""
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise _Malformed(f"message {number} has parts other than text, got {_short(parts)}.")
    return "".join(map(str, texts))


def _sharegpt(row: Mapping[str, Any]) -> _Fields:
    turns = row["conversations"]
    if not isinstance(turns, list) or not turns:
        raise _Malformed(f"'conversations' must be a list of turns, got {_short(turns)}.")
    messages = []
    for number, turn in enumerate(turns, start=1):
        speaker = turn.get("from") if isinstance(turn, dict) else None
        if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
            raise _Malformed(
                f"turn {number} must have 'from', one of {', '.join(SHAREGPT_ROLES)}; "
                f"got {_short(turn)}."
            )
        messages.append({"role": SHAREGPT_ROLES[speaker], "content": _text(turn, "value")})
    return {"messages": tuple(messages)}


def _turns(row: Mapping[str, Any]) -> _Fields:
    turns = row["turns"]
    if not isinstance(turns, list) or not turns:
        raise _Malformed(f"'turns' must be a list of texts, got {_short(turns)}.")
    texts = [_text({"turns": turn}, "turns") for turn in turns]
    messages = tuple({"role": "user", "content": text} for text in texts)
    return {"messages": messages, "plain": len(messages) == 1}


def _instruction(row: Mapping[str, Any]) -> _Fields:
    question = _text(row, "instruction")
    if row.get("input"):
        question += "\n\n" + _text(row, "input")
    return {"messages": (_user(question), *_answer(row, "output"))}


def _prompt(row: Mapping[str, Any]) -> _Fields:
    if isinstance(row["prompt"], list):
        return _messages({**row, "messages": row["prompt"]})
    answer = _answer(row, "response")
    return {"messages": (_user(_text(row, "prompt")), *answer), "plain": not answer}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _answer(row: Mapping[str, Any], key: str) -> tuple[Message, ...]:
    return ({"role": "assistant", "content": _text(row, key)},) if row.get(key) else ()


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise _Malformed(f"{key!r} must be a text that is not blank, got {_short(value)}.")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


_SHAPES: dict[str, Callable[[Mapping[str, Any]], _Fields]] = {
    "prompt_ids": _ids,
    "messages": _messages,
    "conversations": _sharegpt,
    "turns": _turns,
    "instruction": _instruction,
    "prompt": _prompt,
}
