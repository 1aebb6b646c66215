"""What private text looks like: e-mail addresses, telephone numbers, payment cards, bank accounts.

Recognisers find what has a form and, where the form has one, a right check digit. They cannot know
that a name, a street or a diagnosis is private: that is for the user to mark.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from moaspec.errors import InputError
from moaspec.extras import require
from moaspec.remote.private.folding import Folded, fold
from moaspec.remote.private.spans import Span

Recogniser = Callable[[str], Iterable[Span]]
"""Finds spans in a text; any function will do."""

_EMAIL = re.compile(r"[\w.!#$%&'*+/=?^`{|}~-]+@[\w-]+(?:[.\u3002][\w-]+)+")
_BETWEEN = "[ ./:_|\u00b7\u2022-]{0,3}"
"""What may stand between digits of a number that is written in groups."""
_DIGITS = re.compile(rf"\d(?:{_BETWEEN}\d)*")
_CARD_LENGTHS = range(12, 20)
_IBAN = re.compile(
    rf"(?=([a-z]{_BETWEEN}[a-z](?:{_BETWEEN}\d){{2}}(?:{_BETWEEN}[a-z0-9]){{11,30}}))"
)
_IBAN_LENGTHS = range(15, 35)


def emails(text: str) -> Iterator[Span]:
    """E-mail addresses, international ones included."""
    folded = fold(text, accents=False)
    for found in _EMAIL.finditer(folded.text):
        yield Span(*folded.span(*found.span()), "EMAIL")


def cards(text: str) -> Iterator[Span]:
    """Numbers of payment cards: 12 to 19 digits, in groups or not, whose check digit is right.

    Other digits may stand around them, such as a date of expiry: any run of whole groups may be the
    number.
    """
    is_valid = _library("stdnum.luhn").is_valid
    folded = fold(text, accents=False)
    for found in _DIGITS.finditer(folded.text):
        groups = [one.span() for one in re.finditer(r"\d+", found.group())]
        for start, stop in _runs(groups):
            digits = re.sub(r"\D", "", found.group()[start:stop])
            if len(digits) in _CARD_LENGTHS and is_valid(digits):
                yield Span(*folded.span(found.start() + start, found.start() + stop), "CARD")


def _runs(groups: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Every run of consecutive groups that could be as long as a card's number."""
    longest = max(_CARD_LENGTHS)
    for first in range(len(groups)):
        for last in range(first, min(first + longest, len(groups))):
            yield groups[first][0], groups[last][1]


def ibans(text: str) -> Iterator[Span]:
    """International bank account numbers whose length and check digits are right.

    One may begin anywhere, within what began like another, too.
    """
    is_valid = _library("stdnum.iban").is_valid
    folded = fold(text, accents=False)
    for found in _IBAN.finditer(folded.text):
        places = [place for place in range(*found.span(1)) if folded.text[place].isalnum()]
        # The words that follow are of the same characters: shorten until the number is whole.
        for size in reversed(_IBAN_LENGTHS):
            number = "".join(folded.text[place] for place in places[:size])
            if size <= len(places) and is_valid(number):
                yield Span(*folded.span(places[0], places[size - 1] + 1), "IBAN")
                break


@dataclass(frozen=True)
class Phones:
    """Telephone numbers that exist in the numbering plans of the world.

    Attributes:
        regions: two-letter countries whose national forms count too; numbers that begin with a plus
            are found wherever they are from.
    """

    regions: tuple[str, ...] = ("US",)

    def __call__(self, text: str) -> Iterator[Span]:
        """Numbers in a text."""
        phonenumbers = _library("phonenumbers")
        unknown = set(self.regions) - set(phonenumbers.SUPPORTED_REGIONS)
        if unknown:
            raise InputError(f"Unknown telephone regions {sorted(unknown)}; for example US, DE.")
        # Folding joins lines, of which each may end in a number: both texts are read.
        plain, folded = Folded(text, text, tuple(range(len(text)))), fold(text, accents=False)
        texts = (plain,) if folded.text == text.casefold() else (plain, folded)
        places = {
            read.span(found.start, found.end)
            for region, read in product(self.regions or (None,), texts)
            for found in phonenumbers.PhoneNumberMatcher(read.text, region)
        }
        for place in sorted(places):
            yield Span(*place, "PHONE")


def default(phone_regions: Sequence[str] = ("US",)) -> tuple[Recogniser, ...]:
    """All recognisers of this file.

    Args:
        phone_regions: see `Phones`.

    Raises:
        InputError: the libraries that they use are not installed.
    """
    _library("stdnum.luhn")
    return ibans, cards, emails, Phones(tuple(phone_regions))


def _library(name: str) -> Any:
    """A library of the extra `private`; only those who use recognisers need it."""
    import importlib

    require("Recognising private spans (not needed with --no-recognise)", "private")
    return importlib.import_module(name)
