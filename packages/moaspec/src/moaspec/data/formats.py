"""Formats of rows: OpenAI's, ShareGPT's, LLaMA-Factory's, Alpaca's, TRL's, and this package's own.

A format reads a column and those that belong to it, and removes them from the row. What is left is
not used, and is told.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

from moaspec_core.chat.messages import MalformedError, Message, normal_messages, normal_tool, short

CALLERS = ("function_call", "tool_call")  # speakers whose text is a tool call
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "ai", "assistant"), "assistant"),
    "system": "system",
    "developer": "developer",
    **dict.fromkeys(
        ("tool", "function", "function_response", "tool_response", "observation"), "tool"
    ),
    **dict.fromkeys(CALLERS, "assistant"),
}
"""Roles by ShareGPT's speakers."""
SYSTEM_ROLES = ("system", "developer")
MESSAGE_KEYS = ("name", "tool_calls", "tool_call_id", "function_call")
"""Keys of a message, beside its role and text, that every chat template may read."""

QUESTIONS = ("instruction", "prompt", "question", "query")
CONTEXTS = ("input", "context")
ANSWERS = ("output", "response", "completion", "answer", "chosen")
SYSTEMS = ("system", "system_prompt")
TOOLS = ("tools", "functions")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
VERDICTS = ("label", "kto_tag")
"""Columns that say whether a row's answer is a good one (KTO)."""
OWN_COLUMNS = ("source", "turn", "stop_reason", "messages")
"""Beside `prompt_ids` in rows that `moaspec data regenerate` wrote."""

LOSS_KEYS = ("weight", "loss_weight", "train", "training", "loss")
"""Keys of a message or a row that say whether it carries loss, of several programs."""
YES_OR_NO = {
    **dict.fromkeys(("true", "t", "yes", "y", "on"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off"), False),
}
"""Beside numbers, of which 1 says yes and 0 says no."""

Columns = dict[str, Any]  # of a row, or keys of a message, that are not read yet
Fields = dict[str, Any]  # of a Conversation
RawMessages = list[dict[str, Any]]  # messages before they are converted to the normal form


def read_row(row: Mapping[str, Any]) -> Fields:
    """Fields of the conversation in a row; MalformedError for no known format, or wrong types."""
    columns = dict(row)
    _refuse_other_answers(columns)
    given = [name for name in FORMATS if columns.get(name) is not None]
    if not given:
        raise MalformedError(
            f"none of the columns {', '.join(FORMATS)}; the row has "
            f"{', '.join(map(str, row)) or 'no columns'}. Rename its columns, for example to "
            "'prompt' and 'response', or write 'messages'."
        )
    name = _first(columns, given) or given[0]
    identifier = columns.pop("id", None)
    fields = FORMATS[name](columns, name)
    if "prompt_ids" not in fields:  # else the target's own tokens count, whatever they say
        _require_objects(fields["messages"])
        if not _take_loss(columns):
            fields["messages"] = tuple(map(_without_loss, fields["messages"]))
    fields["name"] = str(identifier) if isinstance(identifier, str | int) else ""
    fields["unused"] = tuple(str(one) for one in columns if not _is_empty(columns[one]))
    return fields


def _refuse_other_answers(columns: Columns) -> None:
    media = _first(columns, MEDIA)
    if media is not None:
        raise MalformedError(f"{media!r} cannot be read, only text. Leave such rows out.")
    for name in _named(columns, VERDICTS):
        is_good = _yes_or_no(columns[name])
        if is_good is False:
            raise MalformedError(
                f"{name!r} is {short(columns[name])}: its answer is one that a model shall not "
                "give (KTO). Leave such rows out."
            )
        if is_good:
            del columns[name]


def _require_objects(messages: Iterable[Message]) -> None:
    """Refuse tool calls whose arguments are no JSON object."""
    for number, message in enumerate(messages, start=1):
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            if not isinstance(arguments, dict):
                raise MalformedError(
                    f"message {number}: the arguments of a call must be a JSON object, got "
                    f"{short(arguments)}."
                )


def _without_loss(message: Message) -> Message:
    return {**message, "weight": 0} if message["role"] == "assistant" else message


def _read_token_ids(columns: Columns, name: str) -> Fields:
    given = _first(columns, ["messages"])
    fields = _read_messages(columns, given) if given else {"tools": _tools(columns)}
    for own in OWN_COLUMNS:
        columns.pop(own, None)
    fields["prompt_ids"] = _token_ids(columns, name)
    if not fields["prompt_ids"]:
        raise MalformedError(f"{name!r} is empty; a response needs something before it.")
    if columns.get("response_ids") is not None:
        fields["response_ids"] = _token_ids(columns, "response_ids")
    return fields


def _read_messages(columns: Columns, name: str) -> Fields:
    told = _listed(columns, columns.pop(name), name)
    unanswered = told[-1]["role"] in ("user", "tool") and name not in ANSWERS
    return _conversation(columns, [*told, *_answer(columns)] if unanswered else told)


def _read_user_turns(columns: Columns, name: str) -> Fields:
    turns = columns.pop(name)
    if not isinstance(turns, list) or not turns:
        raise _wrong(name, "a list of texts", turns)
    told = [{"role": "user", "content": _text(turn, name)} for turn in turns]
    return _conversation(columns, told, plain=True)


def _read_question(columns: Columns, name: str) -> Fields:
    question = columns.pop(name)
    answer = _answer(columns)
    if answer and answer[0]["role"] != "assistant":
        told = answer  # `chosen` with its prompt in it
    elif isinstance(question, list):
        told = [*_listed(columns, question, name), *answer]
    else:
        texts = [_text(question, name)]
        context = _first(columns, CONTEXTS)
        if context is not None:
            texts.append(_text(columns.pop(context), context))
        told = [{"role": "user", "content": "\n\n".join(texts)}, *answer]
    return _conversation(columns, told, plain=name != "instruction")


FORMATS: dict[str, Callable[[Columns, str], Fields]] = {
    "prompt_ids": _read_token_ids,
    **dict.fromkeys(("messages", "conversations", "conversation"), _read_messages),
    "turns": _read_user_turns,
    **dict.fromkeys(QUESTIONS, _read_question),
    "chosen": _read_messages,
}
"""What reads a row: the first of these columns that is not empty decides."""


def _conversation(columns: Columns, told: RawMessages, *, plain: bool = False) -> Fields:
    """Messages with what stands beside them in any format.

    Args:
        plain: a single question makes sense without a chat template, too.
    """
    around = [*_system(columns, told), *_history(columns)]
    start = 1 if told[0]["role"] in SYSTEM_ROLES else 0
    messages = normal_messages([*told[:start], *around, *told[start:]])
    tools = _tools(columns)
    return {
        "messages": messages,
        "tools": tools,
        "variables": _structure(columns, "chat_template_kwargs", dict, "an object"),
        "plain": plain and [one["role"] for one in messages] == ["user"] and not tools,
    }


def _listed(columns: Columns, value: Any, name: str) -> RawMessages:
    """Messages of OpenAI's form or ShareGPT's."""
    value = _parsed(value, name)
    if not isinstance(value, list) or not value:
        raise _wrong(name, "a list of messages", value)
    return [_message(columns, message, number) for number, message in enumerate(value, start=1)]


def _message(columns: Columns, message: Any, number: int) -> dict[str, Any]:
    """A message in OpenAI's form; keys that only some chat templates read are left in `columns`."""
    if not isinstance(message, dict):
        raise MalformedError(f"message {number} must be an object, got {short(message)}.")
    is_sharegpt = message.get("from") is not None
    given = message["from"] if is_sharegpt else message.get("role")
    if not isinstance(given, str):
        raise MalformedError(
            f"message {number} must have 'role' and 'content', or 'from' and 'value'; got "
            f"{short(message)}."
        )
    speaker = given.lower()
    if is_sharegpt and speaker not in ROLES:
        raise MalformedError(
            f"message {number} must have 'from', one of {', '.join(ROLES)}; got {short(message)}."
        )
    role = ROLES.get(speaker, given)
    keys = {key: value for key, value in message.items() if key not in ("from", "role")}
    text = _take_text(keys, ("value", "content") if is_sharegpt else ("content", "value"))
    silent = not _take_loss(keys, role) and role == "assistant"
    unread = [key for key in keys if key not in MESSAGE_KEYS and not _is_empty(keys[key])]
    columns.update({f"messages.{key}": keys[key] for key in unread})
    loss_keys = _named(keys, LOSS_KEYS)
    others = {key: keys[key] for key in keys if key not in ("content", "value", *loss_keys)}
    if silent:
        others["weight"] = 0
    if speaker in CALLERS:
        return {**others, "role": role, "tool_calls": _calls(text, number)}
    is_blank = not isinstance(text, str) or (role in ("user", "assistant") and not text.strip())
    if is_sharegpt and is_blank:
        raise MalformedError(f"'value' of message {number} must be a text, got {short(text)}.")
    return {**others, "role": role, "content": text}


def _take_text(keys: Columns, names: tuple[str, str]) -> Any:
    """Remove a message's text: of the first name that has one. Another text stays."""
    first, second = map(keys.get, names)
    text = second if _is_empty(first) and second is not None else first
    for name in names:
        if keys.get(name) == text:
            keys.pop(name, None)
    return text


def _take_loss(columns: Columns, role: str = "assistant") -> bool:
    """Remove keys that say yes or no; False if one says that nothing carries loss.

    A yes for another role than the assistant stays: it has no effect. But OpenAI's weight may be 1.
    """
    carries = True
    for key in _named(columns, LOSS_KEYS):
        says = _yes_or_no(columns[key])
        if says is False or (says and (role == "assistant" or key.lower().endswith("weight"))):
            del columns[key]
            carries = carries and says
    return carries


def _named(columns: Columns, names: Iterable[str]) -> list[str]:
    """Columns of these names, in upper or lower case."""
    return [column for column in columns if str(column).lower() in names]


def _yes_or_no(value: Any) -> bool | None:
    """What a boolean, a number or a word says; None for any other value."""
    try:
        text = str(value).strip().lower()
        return YES_OR_NO[text] if text in YES_OR_NO else {0.0: False, 1.0: True}.get(float(text))
    except ValueError:  # no number, or an integer of too many digits
        return None


def _calls(value: Any, number: int) -> list[Any]:
    """LLaMA-Factory's calls: JSON text of one call or a list of calls."""
    try:
        calls = json.loads(value, strict=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedError(
            f"'value' of message {number} must be a call as JSON, an object with 'name' and "
            f"'arguments'; got {short(value)}."
        ) from error
    return calls if isinstance(calls, list) else [calls]


def _answer(columns: Columns) -> RawMessages:
    """A text, a message, or a list of messages; empty where there is none."""
    name = _first(columns, ANSWERS)
    if name is None:
        return []
    answer = columns.pop(name)
    if isinstance(answer, dict | list):
        return _listed(columns, [answer] if isinstance(answer, dict) else answer, name)
    return [{"role": "assistant", "content": _text(answer, name)}]


def _system(columns: Columns, told: RawMessages) -> RawMessages:
    name = _first(columns, SYSTEMS)
    if name is None:
        return []
    text = _text(columns.pop(name), name)
    own = [one for one in told if one["role"] in SYSTEM_ROLES]
    if own and [one["content"] for one in normal_messages(own)] != [text]:
        raise MalformedError(
            f"the row has {name!r} and a system message that is another one. Keep one of them."
        )
    return [] if own else [{"role": "system", "content": text}]


def _history(columns: Columns) -> RawMessages:
    """LLaMA-Factory's earlier turns: pairs of question and answer, or messages."""
    what = "a list of [question, answer] or of messages"
    turns = _structure(columns, "history", list, what)
    if turns and isinstance(turns[0], dict):
        return _listed(columns, turns, "history")
    pairs = [turn for turn in turns if isinstance(turn, list) and len(turn) == 2]
    if len(pairs) < len(turns) or not all(isinstance(text, str) for text in chain(*pairs)):
        raise _wrong("history", what, turns)
    return [
        {"role": "assistant" if i % 2 else "user", "content": text}
        for i, text in enumerate(chain(*pairs))
    ]


def _tools(columns: Columns) -> tuple[Any, ...]:
    """A list, or LLaMA-Factory's JSON text of one; `functions` is OpenAI's older name."""
    name = _first(columns, TOOLS) or TOOLS[0]
    return tuple(map(normal_tool, _structure(columns, name, list, "a list of functions")))


def _structure(columns: Columns, name: str, kind: type, what: str) -> Any:
    """A column of this type, or its JSON text; an empty value where it is absent."""
    value = _parsed(columns.pop(name, None), name) or kind()
    if not isinstance(value, kind):
        raise _wrong(name, what, value)
    return value


def _parsed(value: Any, name: str) -> Any:
    """A value that tables store as JSON text."""
    if not isinstance(value, str) or not value.strip():
        return value or None
    try:
        return json.loads(value, strict=False)
    except (ValueError, RecursionError) as error:
        raise _wrong(name, "JSON", value) from error


def _token_ids(columns: Columns, name: str) -> tuple[int, ...]:
    value = columns.pop(name)
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        raise _wrong(name, "a list of integers", value)
    return tuple(value)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _wrong(name, "a text that is not blank", value)
    return value


def _wrong(name: str, expected: str, got: Any) -> MalformedError:
    return MalformedError(f"{name!r} must be {expected}, got {short(got)}.")


def _first(columns: Columns, names: Iterable[str]) -> str | None:
    """The first of these columns that holds something."""
    return next((name for name in names if not _is_empty(columns.get(name))), None)


def _is_empty(value: Any) -> bool:
    return value in (None, [], {}) or (isinstance(value, str) and not value.strip())
