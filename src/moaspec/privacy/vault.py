"""Placeholders for private text, and the way back. What stands for what is only ever in memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from moaspec.errors import InputError
from moaspec.privacy.folding import copies
from moaspec.privacy.known_texts import Finder
from moaspec.privacy.recognisers import Recogniser, default
from moaspec.privacy.spans import Span, marked, united

PLACEHOLDER = re.compile(r"\[[A-Z]{2,16}_\d{1,6}\]")
_BEGINNING = re.compile(r"\[(?:[A-Z]{0,16}|[A-Z]{2,16}_\d{0,6})\Z")
"""What may still become a placeholder when more text arrives."""

LITERAL = "TEXT"
"""Kind of text that looks like a placeholder without being one."""


class Vault:
    """Replaces private text by placeholders, always the same one for the same text.

    What was private once is so everywhere: a later text in which it stands unmarked, an answer that
    names it, the whole conversation of the next turn. Only text that was sent before somebody
    marked it is beyond help.

    The object cannot be pickled or copied, and does not show what it holds.

    Args:
        recognisers: find private text that nobody marked; None takes all that there are.
    """

    def __init__(self, recognisers: Iterable[Recogniser] | None = None) -> None:
        self._recognisers = default() if recognisers is None else tuple(recognisers)
        self._placeholders: dict[str, str] = {}
        self._values: dict[str, str] = {}
        self._kinds: dict[str, str] = {}
        self._finder: Finder | None = None
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"<Vault of {len(self)} private texts>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A Vault stays in memory: it cannot be pickled or copied.")

    @property
    def placeholders(self) -> tuple[str, ...]:
        """All that stand for something."""
        return tuple(self._values)

    def hide(self, text: str) -> str:
        """A text to send: marked, recognised and known private text replaced, marks removed.

        Raises:
            InputError: marks that are not closed, or what only looks like a mark.
        """
        return self.hide_texts([text])[0]

    def hide_messages(self, messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
        """A conversation to send, with the messages of all roles hidden; see `hide_texts`."""
        hidden = self.hide_texts([message["content"] for message in messages])
        pairs = zip(messages, hidden, strict=True)
        return [{**message, "content": content} for message, content in pairs]

    def hide_texts(self, texts: Sequence[str]) -> list[str]:
        """`hide` for texts that belong together.

        What one of them marks is hidden in all of them, earlier ones too.

        Raises:
            InputError: see `hide`.
        """
        return self._hidden([marked(text) for text in texts])

    def hide_spans(self, text: str, spans: Iterable[Span]) -> str:
        """`hide` for a text without marks, whose private spans the caller names.

        Raises:
            InputError: a span past the text's end.
        """
        return self._hidden([(text, list(spans))])[0]

    def restore(self, text: str) -> str:
        """The text with every placeholder of this vault replaced by what it stands for."""
        return PLACEHOLDER.sub(lambda found: self._values.get(found[0], found[0]), text)

    def restorer(self) -> Restorer:
        """`restore` for text that arrives in pieces."""
        return Restorer(self)

    def _hidden(self, texts: Sequence[tuple[str, list[Span]]]) -> list[str]:
        """Texts without marks and their marked spans, with all that is private replaced."""
        found = [(text, self._learned(text, spans)) for text, spans in texts]
        if self._finder is None:
            self._finder = Finder(self._kinds)
        return [self._replaced(text, [*spans, *self._known(text)]) for text, spans in found]

    def _learned(self, text: str, spans: list[Span]) -> list[Span]:
        """What the user named and what recognisers find; both are known from now on."""
        found = [*spans, *(span for recognise in self._recognisers for span in recognise(text))]
        for span in found:
            if span.stop > len(text):
                raise InputError(
                    f"A span ends at {span.stop}, in a text of {len(text)} characters."
                )
            value = text[span.start : span.stop]
            self._placeholder(value, span.kind)
            if value not in self._kinds:
                self._kinds[value], self._finder = span.kind, None
        return found

    def _known(self, text: str) -> list[Span]:
        """Where text stands that is known to be private, and text that looks like a placeholder."""
        assert self._finder is not None, "_hidden() has made it"
        found = [Span(*one.span(), LITERAL) for one in PLACEHOLDER.finditer(text)]
        return [*found, *(span for copy in copies(text) for span in self._finder.find(copy))]

    def _replaced(self, text: str, spans: list[Span]) -> str:
        kept, place = list[str](), 0
        for span in united(spans):
            value = text[span.start : span.stop]
            kept += [text[place : span.start], self._placeholder(value, span.kind)]
            place = span.stop
        return "".join([*kept, text[place:]])

    def _placeholder(self, value: str, kind: str) -> str:
        if value not in self._placeholders:
            self._counts[kind] = number = self._counts.get(kind, 0) + 1
            placeholder = f"[{kind}_{number}]"
            self._placeholders[value], self._values[placeholder] = placeholder, value
        return self._placeholders[value]


def beginning(text: str) -> int:
    """Where a placeholder begins that more text may complete; the text's length where none does."""
    found = _BEGINNING.search(text)
    return len(text) if found is None else found.start()


class Restorer:
    """Restores text that arrives in pieces; a piece may end within a placeholder.

    Args:
        vault: knows what placeholders stand for.
    """

    def __init__(self, vault: Vault) -> None:
        self._vault, self._pending = vault, ""

    def push(self, piece: str) -> str:
        """What can be shown now; the beginning of a placeholder waits for its end."""
        text = self._pending + piece
        place = beginning(text)
        self._pending = text[place:]
        return self._vault.restore(text[:place])

    def close(self) -> str:
        """What was still waiting: the text has ended, and it was no placeholder."""
        text, self._pending = self._pending, ""
        return self._vault.restore(text)
