"""Placeholders for private text; the mapping is kept in memory only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from moaspec_core.errors import InputError
from moaspec_core.privacy.folding import folded_copies
from moaspec_core.privacy.known_texts import PrivateTextFinder
from moaspec_core.privacy.recognisers import Recogniser, default
from moaspec_core.privacy.spans import Span, marked, merge_spans

PLACEHOLDER = re.compile(r"\[[A-Z]{2,16}_\d{1,6}\]")
_BEGINNING = re.compile(r"\[(?:[A-Z]{0,16}|[A-Z]{2,16}_\d{0,6})\Z")
"""Text that may become a placeholder when more text arrives."""

LITERAL = "TEXT"
"""Kind of text that has the form of a placeholder but is none."""


class Vault:
    """Replaces private text by placeholders; equal texts have equal placeholders.

    Text that was private once stays private: in later texts without marks, in answers, and in the
    whole conversation of the next turn. Text that was sent before it was marked cannot be hidden.

    A vault cannot be pickled or copied, and its representation shows no private text.

    Args:
        recognisers: find private text without marks; None takes `recognisers.default()`, () none.

    Raises:
        InputError: the extra `private`, which the default recognisers need, is not installed.
    """

    def __init__(self, recognisers: Iterable[Recogniser] | None = None) -> None:
        self._recognisers = default() if recognisers is None else tuple(recognisers)
        self._placeholders: dict[str, str] = {}
        self._values: dict[str, str] = {}
        self._kinds: dict[str, str] = {}
        self._finder: PrivateTextFinder | None = None
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"<Vault of {len(self)} private texts>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A Vault stays in memory: it cannot be pickled or copied.")

    @property
    def placeholders(self) -> tuple[str, ...]:
        """All placeholders in use."""
        return tuple(self._values)

    def hide(self, text: str) -> str:
        """Replace marked, recognised and known private text, and remove the marks.

        Raises:
            InputError: a mark is not closed or is misspelt.
        """
        return self.hide_texts([text])[0]

    def hide_messages(self, messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
        """Hide the content, one string each, of messages of all roles; see `hide_texts`."""
        hidden = self.hide_texts([message["content"] for message in messages])
        pairs = zip(messages, hidden, strict=True)
        return [{**message, "content": content} for message, content in pairs]

    def hide_texts(self, texts: Sequence[str]) -> list[str]:
        """Hide several texts; text that is marked in one is hidden in all.

        Raises:
            InputError: see `hide`.
        """
        return self._hidden([marked(text) for text in texts])

    def hide_spans(self, text: str, spans: Iterable[Span]) -> str:
        """Hide the given spans of a text without marks.

        Raises:
            InputError: a span exceeds the text.
        """
        return self._hidden([(text, list(spans))])[0]

    def restore(self, text: str) -> str:
        """Replace the placeholders of this vault by their texts."""
        return PLACEHOLDER.sub(lambda found: self._values.get(found[0], found[0]), text)

    def restorer(self) -> Restorer:
        """Make a `Restorer` for text that arrives in pieces."""
        return Restorer(self)

    def _hidden(self, texts: Sequence[tuple[str, list[Span]]]) -> list[str]:
        """Replace all private text; takes texts without marks, and their spans."""
        found = [(text, self._find_and_remember(text, spans)) for text, spans in texts]
        if self._finder is None:
            self._finder = PrivateTextFinder(self._kinds)
        return [self._replaced(text, [*spans, *self._known_spans(text)]) for text, spans in found]

    def _find_and_remember(self, text: str, spans: list[Span]) -> list[Span]:
        """Add recognised spans to marked ones, and remember the texts of both."""
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

    def _known_spans(self, text: str) -> list[Span]:
        """Find known private text, and text that has the form of a placeholder."""
        assert self._finder is not None, "_hidden() has made it"
        found = [Span(*one.span(), LITERAL) for one in PLACEHOLDER.finditer(text)]
        return [*found, *(span for copy in folded_copies(text) for span in self._finder.find(copy))]

    def _replaced(self, text: str, spans: list[Span]) -> str:
        kept, place = list[str](), 0
        for span in merge_spans(spans):
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
    """Find the start of an incomplete placeholder at the end, or the text's length."""
    found = _BEGINNING.search(text)
    return len(text) if found is None else found.start()


class Restorer:
    """Restores text that arrives in pieces; a piece may end within a placeholder."""

    def __init__(self, vault: Vault) -> None:
        self._vault, self._pending = vault, ""

    def push(self, piece: str) -> str:
        """Add a piece; returns the text that can be shown, without an incomplete placeholder."""
        text = self._pending + piece
        place = beginning(text)
        self._pending = text[place:]
        return self._vault.restore(text[:place])

    def close(self) -> str:
        """Return the held back text after the last piece."""
        text, self._pending = self._pending, ""
        return self._vault.restore(text)
