"""Shapes of rows: OpenAI, ShareGPT, LLaMA-Factory, Alpaca, TRL, and this package's own."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from moaspec_core.chat.messages import MalformedError, Message, normal_messages, normal_tool, short

CALLERS = ("function_call", "tool_call")  # roles whose text is a tool call
SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "ai", "assistant"), "assistant"),
    "system": "system",
    "developer": "developer",
    **dict.fromkeys(
        ("tool", "function", "function_response", "tool_response", "observation"), "tool"
    ),
    **dict.fromkeys(CALLERS, "assistant"),
}
QUESTIONS = ("instruction", "prompt", "question", "query")
CONTEXTS = ("input", "context")
ANSWERS = ("output", "response", "completion", "answer", "chosen")
SYSTEMS = ("system", "system_prompt")
TOOLS = ("tools", "functions")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
OWN_COLUMNS = ("source", "turn", "stop_reason", "messages")
"""Beside `prompt_ids` in rows that `moaspec data regenerate` wrote."""

LOSS_KEYS = ("weight", "loss_weight", "train", "training", "loss")
"""Keys of a message or a row that say whether it carries loss, of several programs."""
OTHER_LOSS_KEYS = {
    *("loss_scale", "loss_mask", "mask", "masked", "trainable", "train_detail", "sample_weight"),
    *("labels", "completion_mask", "assistant_mask", "assistant_masks", "response_mask"),
    *("train_on_input", "train_on_inputs", "train_on_prompt", "mask_history"),
}
"""Others, which are not read and are told of even where they hold no text."""
SAYS_LOSS = {
    **dict.fromkeys(("1", "1.0", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "0.0", "false", "no", "off"), False),
}
MESSAGE_KEYS = {
    *("role", "content", "from", "value", "name", "tool_calls", "tool_call_id", "function_call"),
    *LOSS_KEYS,
}
NAMED = ("from", "value", "content")
"""Keys of a message that have one name in OpenAI's form and another in ShareGPT's."""
TAGS = ("label", "kto_tag")
"""Columns that say whether a row's answer is a good one (KTO)."""
Fields = dict[str, Any]
RawMessages = list[dict[str, Any]]  # messages before they are converted to the normal form


class DataRow:
    """A row that remembers which of its columns were read."""

    def __init__(self, value: Mapping[str, Any]) -> None:
        self._value, self._used, self._inner = value, set[str](), dict[str, None]()

    def get(self, key: str) -> Any:
        """A column's value, read; None where it is absent."""
        self._used.add(key)
        return self._value.get(key)

    def peek(self, key: str) -> Any:
        """A column's value, which does not count as read."""
        return self._value.get(key)

    def is_given(self, key: str) -> bool:
        """Whether a column is there, empty or not."""
        return self._value.get(key) is not None

    def first(self, keys: Iterable[str]) -> str | None:
        """The first of these columns that holds something."""
        return next((key for key in keys if not _is_empty(self._value.get(key))), None)

    def names(self) -> str:
        return ", ".join(map(str, self._value)) or "no columns"

    def note_keys(self, message: Mapping[str, Any]) -> None:
        """Note keys of a message that only some chat templates read."""
        for key, value in message.items():
            # A number beside a text may say whether it carries loss, under whatever name.
            if key not in MESSAGE_KEYS and (_matters(key, value) or isinstance(value, int | float)):
                self.note_key(key)

    def note_key(self, key: str) -> None:
        """Note a key of a message that is not used."""
        self._inner[f"messages.{key}"] = None

    def unused(self) -> tuple[str, ...]:
        """Columns that matter and were not read; keys of messages that a template may ignore."""
        left = [k for k, v in self._value.items() if k not in self._used and _matters(k, v)]
        return (*map(str, left), *self._inner)


def read_row(row: DataRow) -> Fields:
    """Fields of the conversation in a row; MalformedError for no known shape, or wrong types."""
    media = row.first(MEDIA)
    if media is not None:
        raise MalformedError(f"{media!r} cannot be read, only text. Leave such rows out.")
    for tag in TAGS:
        if isinstance(row.peek(tag), bool) and not row.get(tag):
            raise MalformedError(
                f"{tag!r} is false: its answer is one that a model shall not give (KTO). Leave "
                "such rows out."
            )
    if row.get("prompt_ids") is not None:
        return _token_rows(row)
    fields = _conversation(row)
    _require_objects(fields["messages"])
    said = {key: carries_loss(row.peek(key)) for key in LOSS_KEYS}
    for key in [key for key, loss in said.items() if loss is not None]:
        row.get(key)
    if False in said.values():
        fields["messages"] = tuple(map(_without_loss, fields["messages"]))
    return fields


def carries_loss(value: Any) -> bool | None:
    """What a value of one of `LOSS_KEYS` says; None where it says neither yes nor no."""
    text = str(value).strip().lower() if isinstance(value, bool | int | float | str) else ""
    return SAYS_LOSS.get(text)


def _without_loss(message: Message) -> Message:
    return {**message, "weight": 0} if message["role"] == "assistant" else message


def _token_rows(row: DataRow) -> Fields:
    fields = _conversation(row) if row.first(["messages"]) else {"tools": _tools(row)}
    for name in OWN_COLUMNS:
        row.get(name)
    fields["prompt_ids"] = _token_ids(row.get("prompt_ids"), "prompt_ids")
    if not fields["prompt_ids"]:
        raise MalformedError("'prompt_ids' is empty; a response needs something before it.")
    if row.get("response_ids") is not None:
        fields["response_ids"] = _token_ids(row.get("response_ids"), "response_ids")
    return fields


def _token_ids(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        raise MalformedError(f"{name!r} must be a list of integers, got {short(value)}.")
    return tuple(value)


def _conversation(row: DataRow) -> Fields:
    key = row.first(_SHAPES) or next((key for key in _SHAPES if row.is_given(key)), None)
    if key is None:
        raise MalformedError(
            f"none of the columns {', '.join(_SHAPES)}; the row has {row.names()}. Rename its "
            "columns, for example to 'prompt' and 'response', or write 'messages'."
        )
    told = _SHAPES[key](row, key)
    around = [*_system(row, told), *_history(row)]
    start = 1 if told[0]["role"] in ("system", "developer") else 0
    messages = [*around, *told] if not start else [told[0], *around, *told[1:]]
    tools = _tools(row)
    return {
        "messages": normal_messages(messages),
        "tools": tools,
        "variables": _optional(row, "chat_template_kwargs", dict, "an object"),
        "plain": key in _PLAIN_TEXTS and _is_question(messages) and not tools,
    }


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


def _is_question(messages: Sequence[Mapping[str, Any]]) -> bool:
    return len(messages) == 1 and messages[0]["role"] == "user"


def _message_list(row: DataRow, key: str) -> RawMessages:
    told = _listed(row, row.get(key), key)
    unanswered = told[-1]["role"] in ("user", "tool") and key not in ANSWERS
    return [*told, *_answer(row)] if unanswered else told


def _listed(row: DataRow, value: Any, name: str) -> RawMessages:
    """Messages of OpenAI's form or ShareGPT's."""
    value = _parsed(value, name)
    if not isinstance(value, list) or not value:
        raise MalformedError(f"{name!r} must be a list of messages, got {short(value)}.")
    return [_raw_message(row, message, number) for number, message in enumerate(value, start=1)]


def _raw_message(row: DataRow, message: Any, number: int) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise MalformedError(f"message {number} must be an object, got {short(message)}.")
    row.note_keys(message)
    is_sharegpt = message.get("from") is not None
    given = message["from"] if is_sharegpt else message.get("role")
    if not isinstance(given, str):
        raise MalformedError(
            f"message {number} must have 'role' and 'content', or 'from' and 'value'; got "
            f"{short(message)}."
        )
    speaker = given.lower()
    role = SHAREGPT_ROLES.get(speaker, given)
    others = {key: value for key, value in message.items() if key not in (*NAMED, *LOSS_KEYS)}
    others |= _loss_of(row, message, role)
    value = _told(row, message, ("value", "content") if is_sharegpt else ("content", "value"))
    if speaker in CALLERS:
        return {**others, "role": "assistant", "tool_calls": _called(value, number)}
    if not is_sharegpt:
        return {**others, "role": role, "content": value}
    if speaker not in SHAREGPT_ROLES:
        raise MalformedError(
            f"message {number} must have 'from', one of {', '.join(SHAREGPT_ROLES)}; got "
            f"{short(message)}."
        )
    if not isinstance(value, str) or (role in ("user", "assistant") and not value.strip()):
        raise MalformedError(f"'value' of message {number} must be a text, got {short(value)}.")
    return {**others, "role": role, "content": value}


def _told(row: DataRow, message: Mapping[str, Any], names: Sequence[str]) -> Any:
    """A message's text: of the first name that has one. Another text is noted as unused."""
    first, second = (message.get(name) for name in names)
    if _is_empty(first):
        return first if second is None else second
    if second != first and _carries_text(second):
        row.note_key(names[1])
    return first


def _loss_of(row: DataRow, message: Mapping[str, Any], role: str) -> dict[str, int]:
    """`weight` 0 for an assistant's message without loss; what is not used is noted."""
    said = {key: carries_loss(message[key]) for key in LOSS_KEYS if message.get(key) is not None}
    for key, loss in said.items():
        if loss is None or (loss and role != "assistant" and not key.endswith("weight")):
            row.note_key(key)
    return {"weight": 0} if role == "assistant" and False in said.values() else {}


def _called(value: Any, number: int) -> list[Any]:
    """LLaMA-Factory's calls: JSON text of one call or a list of calls."""
    try:
        calls = json.loads(value, strict=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedError(
            f"'value' of message {number} must be a call as JSON, an object with 'name' and "
            f"'arguments'; got {short(value)}."
        ) from error
    return calls if isinstance(calls, list) else [calls]


def _user_turns(row: DataRow, key: str) -> RawMessages:
    turns = row.get(key)
    if not isinstance(turns, list) or not turns:
        raise MalformedError(f"{key!r} must be a list of texts, got {short(turns)}.")
    return [{"role": "user", "content": _text(turn, key)} for turn in turns]


def _question(row: DataRow, key: str) -> RawMessages:
    question = row.get(key)
    answer = _answer(row)
    if answer and answer[0]["role"] != "assistant":
        return answer  # `chosen` with its prompt in it
    if isinstance(question, list):
        return [*_listed(row, question, key), *answer]
    texts = [_text(question, key)]
    context = row.first(CONTEXTS)
    if context is not None:
        texts.append(_text(row.get(context), context))
    return [{"role": "user", "content": "\n\n".join(texts)}, *answer]


def _answer(row: DataRow) -> RawMessages:
    """A text, a message, or a list of messages; empty where there is none."""
    key = row.first(ANSWERS)
    if key is None:
        return []
    answer = row.get(key)
    if isinstance(answer, dict):
        answer = [answer]
    if isinstance(answer, list):
        return _listed(row, answer, key)
    return [{"role": "assistant", "content": _text(answer, key)}]


def _system(row: DataRow, told: RawMessages) -> RawMessages:
    key = row.first(SYSTEMS)
    if key is None:
        return []
    text = _text(row.get(key), key)
    own = [one for one in told if one["role"] in ("system", "developer")]
    if own and [one["content"] for one in normal_messages(own)] != [text]:
        raise MalformedError(
            f"the row has {key!r} and a system message that is another one. Keep one of them."
        )
    return [] if own else [{"role": "system", "content": text}]


def _history(row: DataRow) -> RawMessages:
    """LLaMA-Factory's earlier turns: pairs of question and answer, or messages."""
    what = "a list of [question, answer] or of messages"
    turns = _optional(row, "history", list, what)
    if turns and isinstance(turns[0], dict):
        return _listed(row, turns, "history")
    if not all(map(_is_pair, turns)):
        raise MalformedError(f"'history' must be {what}, got {short(turns)}.")
    roles = ("user", "assistant")
    return [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(roles, turn, strict=True)
    ]


def _is_pair(turn: Any) -> bool:
    return isinstance(turn, list) and len(turn) == 2 and all(isinstance(one, str) for one in turn)


def _tools(row: DataRow) -> tuple[Any, ...]:
    """A list, or LLaMA-Factory's JSON text of one; `functions` is OpenAI's older name."""
    tools = _optional(row, row.first(TOOLS) or TOOLS[0], list, "a list of functions")
    return tuple(map(normal_tool, tools))


def _optional(row: DataRow, key: str, kind: type, what: str) -> Any:
    """A column of this type, or its JSON text; an empty value where it is absent."""
    value = _parsed(row.get(key), key) or kind()
    if not isinstance(value, kind):
        raise MalformedError(f"{key!r} must be {what}, got {short(value)}.")
    return value


def _parsed(value: Any, name: str) -> Any:
    """A value that tables store as JSON text."""
    if not isinstance(value, str) or not value.strip():
        return value or None
    try:
        return json.loads(value, strict=False)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"{name!r} must be JSON, got {short(value)}.") from error


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise MalformedError(f"{name!r} must be a text that is not blank, got {short(value)}.")
    return value


def _is_empty(value: Any) -> bool:
    return value in (None, [], {}) or (isinstance(value, str) and not value.strip())


def _matters(key: Any, value: Any) -> bool:
    """Whether somebody may miss it if it is not used."""
    about_loss = key in OTHER_LOSS_KEYS or key in LOSS_KEYS
    return _carries_text(value) or isinstance(value, bool) or (about_loss and value is not None)


def _carries_text(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_carries_text, value.values()))
    if isinstance(value, list):
        return any(map(_carries_text, value))
    return isinstance(value, str) and bool(value.strip())


_SHAPES: dict[str, Callable[[DataRow, str], RawMessages]] = {
    "messages": _message_list,
    "conversations": _message_list,
    "conversation": _message_list,
    "turns": _user_turns,
    **dict.fromkeys(QUESTIONS, _question),
    "chosen": _message_list,
}
_PLAIN_TEXTS = {"turns", "prompt", "question", "query"}
ROW_COLUMNS = {"prompt_ids", *_SHAPES}
"""Columns of which every row has one."""
