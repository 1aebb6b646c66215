"""Placeholders for private text, and the way back. What stands for what is only ever in memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from moaspec.errors import InputError
from moaspec.remote.private.folding import fold
from moaspec.remote.private.recognisers import Recogniser, default
from moaspec.remote.private.spans import Span, marked, united

_PLACEHOLDER = re.compile(r"\[[A-Z]{2,16}_\d{1,6}\]")
_BEGINNING = re.compile(r"\[(?:[A-Z]{0,16}|[A-Z]{2,16}_\d{0,6})\Z")
"""What may still become a placeholder when more text arrives."""

LITERAL = "TEXT"
"""Kind of text that looks like a placeholder without being one."""

_BETWEEN_DIGITS = re.compile(r"(?<=\d)(?:\\ )?(?=\d)")

_PART_OF_WORD = 3
"""Shorter private text is looked for as a whole word only: two letters are in every third word."""


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
        self._kinds: dict[re.Pattern[str], str] = {}
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"<Vault of {len(self)} private texts>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A Vault stays in memory: it cannot be pickled or copied.")

    def hide(self, text: str) -> str:
        """A text to send: marked, recognised and known private text replaced, marks removed.

        Raises:
            InputError: marks that are not closed.
        """
        return self.hide_spans(*marked(text))

    def hide_messages(self, messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
        """A conversation to send, whoever wrote its messages.

        What one message marks is hidden in all of them, earlier ones too.

        Raises:
            InputError: marks that are not closed.
        """
        for message in messages:
            self._learn(*marked(message["content"]))
        return [{**one, "content": self.hide(one["content"])} for one in messages]

    def hide_spans(self, text: str, spans: Iterable[Span]) -> str:
        """`hide` for a text without marks, whose private spans the caller names.

        Raises:
            InputError: a span past the text's end.
        """
        self._learn(text, spans := list(spans))
        kept, place = [], 0
        for span in united([*spans, *self._recognised(text), *self._known(text)]):
            kept += [
                text[place : span.start],
                self._placeholder(text[span.start : span.stop], span),
            ]
            place = span.stop
        return "".join([*kept, text[place:]])

    def restore(self, text: str) -> str:
        """The text with every placeholder of this vault replaced by what it stands for."""
        return _PLACEHOLDER.sub(lambda found: self._values.get(found[0], found[0]), text)

    def restorer(self) -> Restorer:
        """`restore` for text that arrives in pieces."""
        return Restorer(self)

    def _learn(self, text: str, spans: Iterable[Span]) -> None:
        """Give placeholders to what the user named and what recognisers find."""
        for span in [*spans, *self._recognised(text)]:
            if span.stop > len(text):
                raise InputError(
                    f"A span ends at {span.stop}, in a text of {len(text)} characters."
                )
            self._placeholder(text[span.start : span.stop], span)

    def _recognised(self, text: str) -> list[Span]:
        return [span for recognise in self._recognisers for span in recognise(text)]

    def _known(self, text: str) -> list[Span]:
        """Where text stands that is known to be private, and text that looks like a placeholder."""
        found = [Span(*one.span(), LITERAL) for one in _PLACEHOLDER.finditer(text)]
        folded = fold(text)
        for pattern, kind in self._kinds.items():
            places = (folded.span(*one.span()) for one in pattern.finditer(folded.text))
            found += [Span(*place, kind) for place in places]
        return found

    def _placeholder(self, value: str, span: Span) -> str:
        if value not in self._placeholders:
            self._counts[span.kind] = number = self._counts.get(span.kind, 0) + 1
            placeholder = f"[{span.kind}_{number}]"
            self._placeholders[value], self._values[placeholder] = placeholder, value
            pattern = _pattern(value)
            if span.kind != LITERAL and pattern is not None:
                self._kinds.setdefault(pattern, span.kind)
        return self._placeholders[value]


def _pattern(value: str) -> re.Pattern[str] | None:
    """Finds a private text in folded texts, whatever its spacing; None for one of spaces only."""
    folded = fold(value).text.strip()
    if not folded:
        return None
    # Digits may be grouped in another way; words may be run together, as a word of their own.
    spaced = _BETWEEN_DIGITS.sub(" ?", re.escape(folded))
    joined = rf"(?<!\w){re.escape(folded.replace(' ', ''))}(?!\w)"
    if len(folded) <= _PART_OF_WORD:
        spaced = rf"(?<!\w){spaced}(?!\w)"
    return re.compile(f"{spaced}|{joined}")


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
        beginning = _BEGINNING.search(text)
        place = len(text) if beginning is None else beginning.start()
        self._pending = text[place:]
        return self._vault.restore(text[:place])

    def close(self) -> str:
        """What was still waiting: the text has ended, and it was no placeholder."""
        text, self._pending = self._pending, ""
        return self._vault.restore(text)
