"""Stretches of text that stay on the device, and the marks by which users name them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from moaspec.errors import InputError
from moaspec.remote.private.folding import fold

MARKED = "PRIVATE"
_OPEN, _CLOSE = "<private>", "</private>"
_TAG = re.compile(
    r"(?:<|&(?:lt|#0*60|#x0*3c);)(?P<slashes>[ /\\]*)"
    + " ?".join("private")
    + r"(?![-_]*[^\W_])(?P<end> ?(?:>|&(?:gt|#0*62|#x0*3e);))?"
)
"""What looks like a mark, in a folded text; without an `end` it is none."""
_LOOK_ALIKE = str.maketrans("аαɑеіıιρртτνѵ", "aaaeiiippttvv")
"""Cyrillic, Greek and dotless letters."""
_KIND = re.compile(r"[A-Z]{2,16}")


@dataclass(frozen=True, order=True)
class Span:
    """Characters `start` to `stop - 1` of a text.

    Attributes:
        kind: what they are, two to sixteen capitals; the server sees this.

    Raises:
        InputError: an empty span, or another kind of name.
    """

    start: int
    stop: int
    kind: str = MARKED

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise InputError(f"A span needs 0 <= start < stop, got {self.start} and {self.stop}.")
        if not _KIND.fullmatch(self.kind):
            raise InputError(f"A span's kind is 2 to 16 capital letters, got {self.kind!r}.")


def marked(text: str) -> tuple[str, list[Span]]:
    """A text without its marks, and what stood between `<private>` and `</private>`.

    Capitals, spaces, full-width brackets and characters that nobody sees make no difference to a
    mark.

    Raises:
        InputError: a mark without its partner, one inside another, or what only looks like one.
            Nothing may be sent then: what the user meant to hide is not known.
    """
    plain, spans, place, start = "", [], 0, -1
    for tag in _tags(text):
        if tag.opens == (start >= 0):
            raise InputError(
                f"{text[tag.start : tag.stop]!r} at character {tag.start} has no partner: write "
                f"{_OPEN}...{_CLOSE}, one never inside another."
            )
        plain, place = plain + text[place : tag.start], tag.stop
        if not tag.opens and start < len(plain):
            spans.append(Span(start, len(plain)))
        start = len(plain) if tag.opens else -1
    if start >= 0:
        raise InputError(f"{_OPEN} is never closed; write {_CLOSE} where the private text ends.")
    return plain + text[place:], spans


@dataclass(frozen=True)
class _Tag:
    start: int
    stop: int
    opens: bool


def _tags(text: str) -> Iterator[_Tag]:
    """The marks of a text, however they are spelled; see `marked`."""
    folded = fold(text, accents=False)
    for found in _TAG.finditer(folded.text.translate(_LOOK_ALIKE)):
        start, stop = folded.span(*found.span())
        slashes = found["slashes"].replace(" ", "")
        if found["end"] is None or slashes not in {"", "/"}:
            raise InputError(
                f"{text[start:stop]!r} at character {start} looks like a mark of private text and "
                f"is none: write {_OPEN}...{_CLOSE}, or other words."
            )
        yield _Tag(start, stop, opens=not slashes)


def united(spans: Iterable[Span]) -> list[Span]:
    """Spans that overlap become one, of the kind of the one that starts first.

    Of two that overlap neither may be dropped: the rest of it would stay readable.
    """
    found: list[Span] = []
    for span in sorted(spans, key=lambda one: one.start):
        if found and span.start < found[-1].stop:
            last = found.pop()
            span = Span(last.start, max(last.stop, span.stop), last.kind)
        found.append(span)
    return found
