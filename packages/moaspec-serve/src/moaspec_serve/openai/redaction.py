"""Private text of requests stays on the device: the target server gets placeholders.

Clients get their own text back, but for `provisional`, `correction` and `tree`, which show
placeholders.

A vault exists for one request. Clients send, and the response store keeps, whole conversations with
their marks, so the next request assigns the same placeholders to the same texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from moaspec_core.chat.call_reader import Call
from moaspec_core.chat.messages import Message
from moaspec_core.engine.engine import context_message
from moaspec_core.errors import ContextError
from moaspec_core.privacy.vault import PLACEHOLDER, Vault, beginning
from moaspec_serve.http_errors import RequestError
from moaspec_serve.openai.chat_input import ChatInput
from moaspec_serve.sources.text_writer import Piece

MakeVault = Callable[[], Vault]


class RequestRedactor:
    """Replaces the private text of one request by placeholders.

    Args:
        make_vault: makes the request's vault; None if no text leaves this machine.
        longest: maximum number of characters to search; longer requests fit into no context.
        max_positions: tokens of that context.
    """

    def __init__(self, make_vault: MakeVault | None, longest: int, max_positions: int) -> None:
        self._vault = None if make_vault is None else make_vault()
        self._longest, self._max_positions = longest, max_positions

    @property
    def active(self) -> bool:
        """Whether private text is redacted at all."""
        return self._vault is not None

    @property
    def hides(self) -> bool:
        """Whether the request has placeholders."""
        return self._vault is not None and len(self._vault) > 0

    def hide(self, chat: ChatInput) -> ChatInput:
        """Replace private text anywhere in the request. A private number becomes a string.

        Raises:
            InputError: marks that are not closed, or a text that is too long.
            RequestError: private text where no placeholder is possible, such as in a pattern.
        """
        if self._vault is None:
            return chat
        texts = dict[str, str]()
        _map_texts(chat, lambda text: texts.setdefault(text, text))
        found = dict(zip(texts, self.hide_texts(list(texts)), strict=True))
        hidden = _map_texts(chat, found.__getitem__)
        _check_fixed(chat.tools, hidden.tools)
        _check_fixed(chat.schema, hidden.schema)
        _check_fixed(chat.variables, hidden.variables)
        return hidden

    def hide_texts(self, texts: Sequence[str]) -> list[str]:
        """Replace private text in all of these texts; see `hide`."""
        if self._vault is None:
            return list(texts)
        length = sum(map(len, texts))
        if length > self._longest:
            raise ContextError(
                context_message(self._max_positions, f"your request has {length} characters")
                + "No tokens of this model hold so many. Shorten it."
            )
        return self._vault.hide_texts(texts)

    def check_unchanged(self, texts: Sequence[str]) -> None:
        """Refuse token ids whose text is private, because they cannot be redacted."""
        if self.hide_texts(texts) != list(texts):
            raise RequestError(
                "The prompt's token ids hold private text, or its marks. Send text instead.",
                param="prompt",
            )

    def check_answer(self, *, logprobs: bool, ids: bool, stop: Sequence[str]) -> None:
        """RequestError for token ids, log-probabilities, or stop strings inside of placeholders."""
        if self._vault is None or not self.hides:
            return
        for name, asked in (("logprobs", logprobs), ("return_token_ids", ids)):
            if asked:
                raise RequestError(
                    f"{name} would tell of placeholders where private text is hidden, and this "
                    f"request holds such text. Leave {name} out.",
                    param=name,
                )
        for text in stop:
            for placeholder in self._vault.placeholders:
                if text in placeholder and text != placeholder:
                    raise RequestError(
                        f"The stop string {text!r} is a part of {placeholder}, which stands for "
                        "private text. Use another.",
                        param="stop",
                    )

    def restorer(self, *, as_json: bool = False) -> AnswerRestorer:
        """Restores private text in an answer, or in the strings of a JSON answer."""
        vault = self._vault if self.hides else None
        return AnswerRestorer(vault, _within_json if as_json else str)


class AnswerRestorer:
    """Restores an answer that arrives in pieces; a placeholder may span several pieces."""

    def __init__(self, vault: Vault | None, write: Callable[[str], str]) -> None:
        self._vault, self._write = vault, write
        self._pending: list[Piece] = []

    def take(self, pieces: list[Piece], *, last: bool) -> list[Piece]:
        """Restore the pieces before a possible incomplete placeholder, which waits.

        A private text is in the piece where its placeholder begins.
        """
        if self._vault is None:
            return pieces
        pieces_so_far = [*self._pending, *pieces]
        text = "".join(piece.text for piece in pieces_so_far)
        certain = len(text) if last else beginning(text)
        stops = list(accumulate(len(piece.text) for piece in pieces_so_far))
        # Placeholders become one long character and empty ones, so that places stay the same.
        chars, whole = list(text), set(range(len(text) + 1))
        for found in PLACEHOLDER.finditer(text):
            whole -= set(range(found.start() + 1, found.end()))
            value = self._vault.restore(found[0])
            if value != found[0]:
                empty = [""] * (len(found[0]) - 1)
                chars[slice(*found.span())] = [self._write(value), *empty]
        ends = [i for i, stop in enumerate(stops, 1) if stop <= certain and stop in whole]
        done = max(ends, default=0)
        self._pending = pieces_so_far[done:]
        starts = [0, *stops]
        return [
            replace(piece, text="".join(chars[start:stop]))
            for piece, start, stop in zip(pieces_so_far[:done], starts, stops, strict=False)
        ]

    def restore_text(self, text: str, *, last: bool) -> str:
        """Restore text that arrives without its tokens."""
        return "".join(piece.text for piece in self.take([Piece(text, 0, "target")], last=last))

    def restore_call(self, call: Call) -> Call:
        if self._vault is None:
            return call
        try:
            value = json.loads(call.arguments)
        except ValueError:
            return replace(call, arguments=self._vault.restore(call.arguments))
        restored = _replaced(value, self._vault.restore)
        if restored == value:
            return call
        return replace(call, arguments=json.dumps(restored, ensure_ascii=False))


def _within_json(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)[1:-1]


def _map_texts(chat: ChatInput, new: Callable[[str], str]) -> ChatInput:
    """Apply a function to all texts of a request."""
    return replace(
        chat,
        messages=[_message(message, new) for message in chat.messages],
        tools=_replaced(chat.tools, new),
        schema=_replaced(chat.schema, new),
        variables=_replaced(chat.variables, new),
        stop=tuple(map(new, chat.stop)),
    )


def _message(message: Message, new: Callable[[str], str]) -> Message:
    """Apply a function to the texts of a message, except its role and field names."""
    fields = {key: _replaced(value, new) for key, value in message.items() if key != "tool_calls"}
    fields["role"] = message["role"]
    if "tool_calls" in message:
        fields["tool_calls"] = [_call(call, new) for call in message["tool_calls"]]
    return fields


def _call(call: Mapping[str, Any], new: Callable[[str], str]) -> dict[str, Any]:
    function = {key: _replaced(value, new) for key, value in call["function"].items()}
    return {**call, "id": new(call["id"]), "function": function}


def _replaced(value: Any, new: Callable[[str], str]) -> Any:
    """Apply a function to all texts of JSON, including keys, and to numbers as texts."""
    if isinstance(value, str):
        return new(value)
    if isinstance(value, Mapping):
        return {new(str(key)): _replaced(inner, new) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replaced(inner, new) for inner in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        text = new(str(value))
        return value if text == str(value) else text
    return value


_LITERAL = ("pattern", "type", "format", "required", "$ref")
"""Keywords of JSON schemas whose values cannot be redacted."""


def _check_fixed(before: Any, after: Any) -> None:
    """Refuse private text where a placeholder would change the meaning."""
    if isinstance(before, Mapping):
        changed = list(before) != list(after)
        changed |= any(before.get(key) != after.get(key) for key in _LITERAL)
        function = before.get("function")
        changed |= isinstance(function, Mapping) and function["name"] != after["function"]["name"]
        if changed:
            raise _not_hidden()
        for key, value in before.items():
            _check_fixed(value, after[key])
    elif isinstance(before, (list, tuple)):
        for inner_before, inner_after in zip(before, after, strict=True):
            _check_fixed(inner_before, inner_after)
    elif isinstance(before, (int, float)) and before != after:
        raise _not_hidden()


def _not_hidden() -> RequestError:
    return RequestError(
        "A tool, a schema or chat_template_kwargs hold private text as a name, pattern or number, "
        "where no placeholder can stand for it. Leave it out."
    )
