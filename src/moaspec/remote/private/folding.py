"""A copy of a text in which what reads the same is the same, and the way back to the text.

Compatibility forms, capitals, digits of other scripts, white space, dashes, quotation marks and
angle brackets become the usual ones; characters that nobody sees go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from unicodedata import category, combining, decimal, normalize

_UNSEEN = frozenset("\u034f\u115f\u1160\u17b4\u17b5")
"""Besides control and format characters."""
_SAME = {
    **dict.fromkeys("\u2212\u2043", "-"),
    **dict.fromkeys("\u2044\u2215", "/"),
    **dict.fromkeys("\u2018\u2019\u201b\u2032\u02bc\u02b9`", "'"),
    **dict.fromkeys("\u2039\u2329\u3008\u27e8\u276c\u276e\u02c2", "<"),
    **dict.fromkeys("\u203a\u232a\u3009\u27e9\u276d\u276f\u02c3", ">"),
    "\u2800": " ",
}

_Placed = tuple[str, int]
"""A character, and where the one stands that it was made from."""


@dataclass(frozen=True)
class Folded:
    """A folded text.

    Attributes:
        text: folded.
        source: the text that it was made from.
        origins: where the character of `source` stands that each character was made from.
    """

    text: str
    source: str
    origins: tuple[int, ...]

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Where characters `start` to `stop - 1` stand in the source, their accents included."""
        places = self.origins[start:stop]
        first, end = min(places), max(places) + 1
        while end < len(self.source) and _is_mark(self.source[end]):
            end += 1
        return first, end


def fold(text: str, *, accents: bool = True) -> Folded:
    """Fold a text; without `accents` also what stands above and below letters goes."""
    seen = [(char, place) for place, char in enumerate(text) if not _is_unseen(char)]
    placed = _ordered(_each(_ordered(_each(seen, _decomposed)), _folded))
    kept = [one for one in placed if accents or not _is_mark(one[0])]
    chars: list[_Placed] = []
    for char, place in kept:
        if char != " " or not chars or chars[-1][0] != " ":
            chars.append((char, place))
    return Folded("".join(char for char, _ in chars), text, tuple(place for _, place in chars))


def _each(chars: Iterable[_Placed], change: Callable[[str], str]) -> list[_Placed]:
    return [(new, place) for char, place in chars for new in change(char)]


def _ordered(chars: list[_Placed]) -> list[_Placed]:
    """Combining characters in canonical order, which decomposing one by one does not give."""
    runs = groupby(chars, key=lambda one: combining(one[0]) > 0)
    return [
        one
        for is_run, run in runs
        for one in (sorted(run, key=lambda one: combining(one[0])) if is_run else run)
    ]


@lru_cache(1 << 12)
def _decomposed(char: str) -> str:
    return "".join(one for one in normalize("NFKD", char) if not _is_unseen(one))


@lru_cache(1 << 12)
def _folded(char: str) -> str:
    return "".join(_usual(one) for one in normalize("NFKD", char.casefold()))


def _usual(char: str) -> str:
    if char.isspace():
        return " "
    digit = decimal(char, None)
    if digit is not None:
        return str(digit)
    return "-" if category(char) == "Pd" else _SAME.get(char, char)


def _is_mark(char: str) -> bool:
    return category(char).startswith("M")


def _is_unseen(char: str) -> bool:
    """Format and control characters, selectors of variants, and fillers."""
    if category(char) in {"Cf", "Cc"}:
        return not char.isspace()
    code = ord(char)
    return char in _UNSEEN or 0xFE00 <= code <= 0xFE0F or 0xE0100 <= code <= 0xE01EF
