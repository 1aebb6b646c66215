"""Private spans of a text, and the marks that set them."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from moaspec_core.errors import InputError
from moaspec_core.privacy.folding import FoldedText, plain_copy
from moaspec_core.sampling.token_ids import common_length

MARKED = "PRIVATE"
_OPEN, _CLOSE = "<private>", "</private>"
_WORD = " ?".join("private")
_TAG = re.compile(
    r"<(?P<before>[ /\\!?#|$%&~+=]{0,8}(?:\w{1,16}[:.])?)(?P<name>"
    + "[ ._-]?".join("private")
    + r")(?![-_]*[^\W_])(?P<end> ?>)?"
)
"""Text that looks like a mark in a folded text; only the correct form is accepted."""
_NO_TAG = re.compile(
    rf"[\[{{(\u00ab] ?[/\\] ?{_WORD} ?[\]}})\u00bb]|> ?[/\\] ?{_WORD} ?<|etavirp"
    r"|<[ /\\]{0,8}(?P<word>[^\W_]{5,10})[ /\\]{0,3}>"
    r"|<[ /\\]{0,8}p ?r ?i ?(?:v ?(?:a ?(?:t ?)?)?)?\Z"
)
"""A mark in other brackets, reversed, misspelt or incomplete."""
_LOOK_ALIKE = str.maketrans(
    "\u1d18\u0280\u026a\u1d00\u1d07\u0430\u03b1\u0251@4\u0435\u0454\u03b5\u212e3\u0456\u03b9\u0131\u0269\u04cf1!l|"
    "\u0440\u03c1\u2ca3\u0433\u1d26\u0442\u03c4\u1d1b7\u0475\u03bd\u1d20\u2228",
    "priaeaaaaaeeeee" + "iiiiiiiii" + "ppprrtttt" + "vvvv",
)
"""Cyrillic, Greek, dotless and phonetic letters, and digits and signs that replace letters."""
_KIND = re.compile(r"[A-Z]{2,16}")


@dataclass(frozen=True, order=True)
class Span:
    """Characters `start` to `stop - 1` of a text.

    Raises:
        InputError: an empty span, or an invalid kind.
    """

    start: int
    stop: int
    kind: str = MARKED  # two to sixteen capitals; the server sees them

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise InputError(f"A span needs 0 <= start < stop, got {self.start} and {self.stop}.")
        if not _KIND.fullmatch(self.kind):
            raise InputError(f"A span's kind is 2 to 16 capital letters, got {self.kind!r}.")


def marked(text: str) -> tuple[str, list[Span]]:
    """Remove the marks `<private>` and `</private>` of a text; returns the text and its spans.

    Capitals, spaces, full-width brackets, escapes and invisible characters in a mark are ignored.

    Raises:
        InputError: a mark has no partner, is inside another, or is misspelt. Nothing may be sent
            then, because the intended span is unknown.
    """
    kept, spans, length, place, start = list[str](), list[Span](), 0, 0, -1
    for first, end, opens in _tags(text):
        if opens == (start >= 0):
            raise InputError(
                f"{text[first:end]!r} at character {first} has no partner: write "
                f"{_OPEN}...{_CLOSE}, one never inside another."
            )
        kept.append(text[place:first])
        length, place = length + first - place, end
        if not opens and start < length:
            spans.append(Span(start, length))
        start = length if opens else -1
    if start >= 0:
        raise InputError(f"{_OPEN} is never closed; write {_CLOSE} where the private text ends.")
    return "".join([*kept, text[place:]]), spans


def _tags(text: str) -> Iterator[tuple[int, int, bool]]:
    """Yield start and end of each mark of a text in any spelling, and whether it opens a span."""
    plain = plain_copy(text)
    spelled = plain.text.translate(_LOOK_ALIKE)
    for found in _NO_TAG.finditer(spelled):
        if found["word"] is None or _is_misspelt(found["word"]):
            raise _refusal(plain, *found.span())
    for found in _TAG.finditer(spelled):
        slash, name = found["before"].replace(" ", ""), found["name"].replace(" ", "")
        if found["end"] is None or slash not in {"", "/"} or name != "private":
            raise _refusal(plain, *found.span())
        yield (*plain.span(*found.span()), not slash)


def _refusal(plain: FoldedText, first: int, end: int) -> InputError:
    start, stop = plain.span(first, end)
    return InputError(
        f"{plain.source[start:stop]!r} at character {start} looks like a mark of private text and "
        f"is none: write {_OPEN}...{_CLOSE}, or other words."
    )


def _is_misspelt(word: str) -> bool:
    """Whether one letter is added, missing, wrong or swapped with the next."""
    right = "private"
    if word == right:
        return False
    head = common_length(word, right)
    rest, other = word[head:], right[head:]
    swapped = rest[1::-1] + rest[2:] if len(rest) > 1 else rest
    return other in (rest[1:], swapped) or rest == other[1:] or rest[1:] == other[1:]


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Merge overlapping spans; the merged span has the kind of the first.

    Dropping one of two overlapping spans would leave its rest readable.
    """
    found: list[Span] = []
    for span in sorted(spans, key=lambda one: one.start):
        if found and span.start < found[-1].stop:
            last = found.pop()
            span = Span(last.start, max(last.stop, span.stop), last.kind)
        found.append(span)
    return found
