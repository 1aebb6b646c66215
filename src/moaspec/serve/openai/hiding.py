"""Private text of requests stays on the device: the server sees placeholders, clients never do.

A vault lives as long as one request. Chats and responses send or keep the whole conversation with
its marks, so that the next request gives the same placeholders to the same texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moaspec.data.messages import Message
from moaspec.data.templates.call_reader import Call
from moaspec.errors import ContextError
from moaspec.privacy.vault import PLACEHOLDER, Vault, beginning
from moaspec.serve.http_errors import RequestError
from moaspec.serve.sources.text_writer import Piece

MakeVault = Callable[[], Vault]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The parts of a request that go to the server.

    Attributes:
        messages: of the normal form.
        tools, schema, variables: JSON, and only their texts for readers may change.
        stop: strings that end the answer.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    schema: Mapping[str, Any] | None = None
    variables: Mapping[str, Any] | None = None
    stop: tuple[str, ...] = ()


class Hiding:
    """Hides the private text of one request.

    Args:
        make_vault: makes the request's vault; None where nothing leaves this machine.
        longest: characters that are searched; longer requests fit into no context.
    """

    def __init__(self, make_vault: MakeVault | None, longest: int) -> None:
        self._vault = None if make_vault is None else make_vault()
        self._longest = longest

    @property
    def active(self) -> bool:
        """Whether anything is hidden here at all."""
        return self._vault is not None

    @property
    def hides(self) -> bool:
        """Whether any text of the request has a placeholder."""
        return self._vault is not None and len(self._vault) > 0

    def hide(self, asked: Asked) -> Asked:
        """The request with placeholders for what is private anywhere in it.

        A number that is private becomes a text.

        Raises:
            InputError: marks that are not closed, or a text that is too long.
            RequestError: private text where no placeholder can stand, such as in a pattern.
        """
        if self._vault is None:
            return asked
        texts = dict[str, str]()
        _each(asked, lambda text: texts.setdefault(text, text))
        found = dict(zip(texts, self.hide_texts(list(texts)), strict=True))
        hidden = _each(asked, found.__getitem__)
        _check_fixed(asked.tools, hidden.tools)
        _check_fixed(asked.schema, hidden.schema)
        _check_fixed(asked.variables, hidden.variables)
        return hidden

    def hide_texts(self, texts: Sequence[str]) -> list[str]:
        """Texts with placeholders for what is private in any of them; see `hide`."""
        if self._vault is None:
            return list(texts)
        length = sum(map(len, texts))
        if length > self._longest:
            raise ContextError(
                f"The request has {length} characters, which no context of this model holds. "
                "Shorten it."
            )
        return self._vault.hide_texts(texts)

    def check_unchanged(self, texts: Sequence[str]) -> None:
        """Refuse token ids whose text has private text: no placeholder can stand for it."""
        if self.hide_texts(texts) != list(texts):
            raise RequestError(
                "The prompt's token ids hold private text, or its marks. Send text instead.",
                param="prompt",
            )

    def check_answer(self, *, logprobs: bool, stop: Sequence[str]) -> None:
        """Refuse what does not go together with placeholders.

        Raises:
            RequestError: log-probabilities, or a stop string that would cut placeholders.
        """
        if self._vault is None or not self.hides:
            return
        if logprobs:
            raise RequestError(
                "logprobs are those of placeholders where private text is hidden, and this "
                "request holds such text. Leave logprobs out.",
                param="logprobs",
            )
        for text in stop:
            for placeholder in self._vault.placeholders:
                if text in placeholder and text != placeholder:
                    raise RequestError(
                        f"The stop string {text!r} is a part of {placeholder}, which stands for "
                        "private text. Use another.",
                        param="stop",
                    )

    def restorer(self, *, as_json: bool = False) -> Restorer | None:
        """Puts private text back into an answer; None where there is none.

        Args:
            as_json: the answer is JSON, and placeholders stand in its strings.
        """
        if self._vault is None or not self.hides:
            return None
        return Restorer(self._vault, _within_json if as_json else str)


class Restorer:
    """Restores an answer that arrives in pieces; a placeholder may be divided among them.

    Args:
        vault: knows what placeholders stand for.
        write: a private text as it has to be written.
    """

    def __init__(self, vault: Vault, write: Callable[[str], str]) -> None:
        self._vault, self._write = vault, write
        self._held: list[Piece] = []

    def take(self, pieces: list[Piece], *, last: bool) -> list[Piece]:
        """Pieces that are certain now, restored; what may become a placeholder waits."""
        self._held += pieces
        text = "".join(piece.text for piece in self._held)
        done = self._whole(text, len(text) if last else beginning(text))
        ready, self._held = self._held[:done], self._held[done:]
        return self._restored(ready)

    def call(self, call: Call) -> Call:
        """A call whose arguments are restored."""
        try:
            value = json.loads(call.arguments)
        except ValueError:
            return replace(call, arguments=self._vault.restore(call.arguments))
        restored = _replaced(value, self._vault.restore)
        if restored == value:
            return call
        return replace(call, arguments=json.dumps(restored, ensure_ascii=False))

    def _whole(self, text: str, certain: int) -> int:
        """How many pieces lie within what is certain and end within no placeholder."""
        inside = [found.span() for found in PLACEHOLDER.finditer(text)]
        place = done = 0
        for count, piece in enumerate(self._held, start=1):
            place += len(piece.text)
            if place > certain:
                break
            if not any(start < place < stop for start, stop in inside):
                done = count
        return done

    def _restored(self, pieces: list[Piece]) -> list[Piece]:
        """Pieces with private text, each in the piece where its placeholder began."""
        text, found = "".join(piece.text for piece in pieces), list[Piece]()
        start = 0
        for piece in pieces:
            found.append(replace(piece, text=self._part(text, start, start + len(piece.text))))
            start += len(piece.text)
        return found

    def _part(self, text: str, start: int, stop: int) -> str:
        """Characters `start` to `stop - 1`, restored."""
        parts, place = list[str](), start
        for found in PLACEHOLDER.finditer(text):
            value = self._vault.restore(found[0])
            if value == found[0] or found.end() <= start or found.start() >= stop:
                continue
            parts.append(text[place : found.start()])
            parts.append(self._write(value) if found.start() >= start else "")
            place = found.end()
        return "".join([*parts, text[place:stop]])


def _within_json(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)[1:-1]


def _each(asked: Asked, new: Callable[[str], str]) -> Asked:
    """A request with other texts."""
    return Asked(
        messages=[_message(one, new) for one in asked.messages],
        tools=_replaced(asked.tools, new),
        schema=_replaced(asked.schema, new),
        variables=_replaced(asked.variables, new),
        stop=tuple(map(new, asked.stop)),
    )


def _message(message: Message, new: Callable[[str], str]) -> Message:
    """A message with other texts; its fields stay."""
    fixed = ("role", "tool_calls")
    said = {key: one if key in fixed else _replaced(one, new) for key, one in message.items()}
    if "tool_calls" not in message:
        return said
    return {**said, "tool_calls": [_call(call, new) for call in message["tool_calls"]]}


def _call(call: Mapping[str, Any], new: Callable[[str], str]) -> dict[str, Any]:
    function = {key: _replaced(one, new) for key, one in call["function"].items()}
    return {**call, "id": new(call["id"]), "function": function}


def _replaced(value: Any, new: Callable[[str], str]) -> Any:
    """JSON with other texts, keys included; a number changes only where its text does."""
    if isinstance(value, str):
        return new(value)
    if isinstance(value, Mapping):
        return {new(str(key)): _replaced(one, new) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replaced(one, new) for one in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        text = new(str(value))
        return value if text == str(value) else text
    return value


_LITERAL = ("pattern", "type", "format", "required", "$ref")
"""Keywords of JSON schemas whose texts mean what they say."""


def _check_fixed(before: Any, after: Any) -> None:
    """Refuse private text where a placeholder would mean something else."""
    if isinstance(before, Mapping):
        changed = list(before) != list(after)
        changed |= any(before.get(key) != after.get(key) for key in _LITERAL)
        function = before.get("function")
        changed |= isinstance(function, Mapping) and function["name"] != after["function"]["name"]
        if changed:
            raise _not_hidden()
        for key, one in before.items():
            _check_fixed(one, after[key])
    elif isinstance(before, (list, tuple)):
        for one, other in zip(before, after, strict=True):
            _check_fixed(one, other)
    elif isinstance(before, (int, float)) and before != after:
        raise _not_hidden()


def _not_hidden() -> RequestError:
    return RequestError(
        "A tool, a schema or chat_template_kwargs hold private text as a name, pattern or number, "
        "where no placeholder can stand for it. Leave it out."
    )
