"""Recognisers of e-mail addresses, telephone numbers, payment cards and bank accounts.

They find text by its form; cards and IBANs also need correct check digits. They cannot recognise
names, streets or diagnoses: users mark these.
"""

import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any

from moaspec_core.errors import InputError
from moaspec_core.privacy.folding import folded_copies, unfolded
from moaspec_core.privacy.spans import Span
from moaspec_core.support.extras import require

Recogniser = Callable[[str], Iterable[Span]]  # finds private spans in a text

_AT = re.compile(r" @ |@ ?| ?[\[({<] ?(?:at|@) ?[\])}>] ?|(?<=[^\W_])\(a\)(?=[^\W\d_])")
_DOT = r"(?:[.\u3002]| ?[\[({<] ?(?:dot|\.) ?[\])}>] ?)"
_TOP = "com|org|net|edu|gov|mil|info|biz|io|dev|app|eu|de|fr|nl|ch|uk|jp|cn|pl|dk|cz|ru|au|ca"
_DOMAIN = re.compile(
    # With spaces around dots only before usual ends: a sentence may begin there.
    rf"[\w-]+(?: ?\. ?[\w-]+){{0,4}} \. (?:{_TOP})(?![\w-])"
    rf"|[\w-]+(?:{_DOT}[\w-]+)+|[\w-]+(?: ?\.|\. )[\w-]+|\[(?:ipv6:)?[0-9a-f.:]{{3,45}}\]"
)
_QUOTED = re.compile(r'"[^"@]{1,64}"\Z')
_IN_LOCAL = frozenset("_.!#$%&'*+/=?^`{|}~-")
_MAX_LOCAL = 256  # most characters of an address before the at-sign

_NEAR = "[ ./:_|\u00b7\u2022-]{0,3}"  # separators between groups of digits
_FAR = r"[\W_]{0,4}"  # separators between the groups of a card or the letters of an account
_DIGITS = re.compile(rf"\d(?:{_NEAR}\d)*")
_CARD_LENGTHS = range(12, 20)
_CENTURIES = ("19", "20")  # no card begins so, and dates do
_DATE = re.compile(
    r"(?<!\d)(?:19|20)\d\d([-/.])(?:0?[1-9]|1[0-2])\1(?:[0-2]?\d|3[01])(?!\d)"
    r"(?:[t ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?)?"
)
_CARD_GROUPS = re.compile(
    r"(?=(\d{4}(?:FAR\d{4}){3}(?:FAR\d{3})?|\d{4}FAR\d{6}FAR\d{4,5}))".replace("FAR", r"[\W_]{1,4}")
)
_LISTED = re.compile(r"(?<![^\W_])\d{1,16}(?:[\W_]{1,6}\d{1,16})+(?![^\W_])")
"""Numbers with anything but letters and digits between them, such as the elements of a list."""
_MAX_LISTED = 160  # characters of a listed card, and one more at least
_SINGLE = re.compile(r"(?<![^\W_])\d(?![^\W_])(?:[\W_]{1,6}\d(?![^\W_]))+")
_BRANDS = re.compile(
    r"4(?:\d{12}|\d{15}|\d{18})|3[47]\d{13}|3(?:0[0-5]|[689]\d)\d{11}|35\d{14}"
    r"|(?:5[1-5]\d\d|222[1-9]|22[3-9]\d|2[3-6]\d\d|27[01]\d|2720)\d{12}"
    r"|6(?:011|4[4-9]\d|5\d\d|2\d\d)\d{12,15}"
)
"""Numbers of the large card companies, which begin with theirs. Digits of a list are a card only
with such a number: lists of numbers are common."""
_WORDED = re.compile(
    (
        r"(?<![0-9])(?:[0-9]{4}(WORD)[0-9]{4}(?:\1[0-9]{4}){2}"
        r"|[0-9]{4}(WORD)[0-9]{6}\2[0-9]{5})(?![0-9])"
    ).replace("WORD", "[^a-z0-9]{0,3}[a-z]{1,5}[^a-z0-9]{0,3}")
)
"""Groups with the same word between them, such as "and"."""
_CARDS_IN_A_ROW = re.compile(r"(?<!\d)(?:\d{16}){2,}(?!\d)")
_IBAN = re.compile(rf"(?=([a-z]{_FAR}[a-z](?:{_FAR}\d){{2}}(?:{_FAR}[a-z0-9]){{11,30}}))")
_IBAN_LENGTHS = range(15, 35)


def emails(text: str) -> Iterator[Span]:
    """Find e-mail addresses, also international ones."""
    places = set[tuple[int, int]]()
    for copy in folded_copies(text):
        for at in _AT.finditer(copy.text):
            domain = _DOMAIN.match(copy.text, at.end())
            start = _local_start(copy.text, at.start())
            if domain is not None and start < at.start():
                places.add(copy.span(start, domain.end()))
    yield from (Span(*place, "EMAIL") for place in sorted(places))


def _local_start(text: str, end: int) -> int:
    """Find the start of the part before an at-sign."""
    start, least = end, max(end - _MAX_LOCAL, 0)
    while start > least and (text[start - 1].isalnum() or text[start - 1] in _IN_LOCAL):
        start -= 1
    quoted = _QUOTED.search(text, max(end - 66, 0), end) if start == end else None
    return start if quoted is None else quoted.start()


def cards(text: str) -> Iterator[Span]:
    """Find payment card numbers: 12 to 19 digits, in groups or not, with a correct check digit.

    Other digits may surround them, such as an expiry date, so every range of groups is tried.
    """
    places = set[tuple[int, int]]()
    for copy in folded_copies(text):
        undated = _DATE.sub(lambda found: "d" * len(found[0]), copy.text)
        for first, end in [found.span() for found in _DIGITS.finditer(undated)]:
            groups = [one.span() for one in re.finditer(r"\d+", copy.text[first:end])]
            for start, stop in _card_ranges(copy.text[first:end], groups):
                places.add(copy.span(first + start, first + stop))
        for found in _CARD_GROUPS.finditer(copy.text):
            if _has_check_digit(re.sub(r"\D", "", found[1])):
                places.add(copy.span(*found.span(1)))
        listed = (form.finditer(copy.text) for form in (_LISTED, _SINGLE, _WORDED))
        for found in chain.from_iterable(listed):
            digits = re.sub(r"\D", "", found[0][:_MAX_LISTED])
            if _BRANDS.fullmatch(digits) and _has_check_digit(digits):
                places.add(copy.span(*found.span()))
        for found in _CARDS_IN_A_ROW.finditer(copy.text):
            if all(map(_has_check_digit, re.findall(r"\d{16}", found[0]))):
                places.add(copy.span(*found.span()))
    yield from (Span(*place, "CARD") for place in sorted(places))


def _card_ranges(text: str, groups: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield ranges of consecutive groups that are a card number."""
    longest = max(_CARD_LENGTHS)
    for first, (start, _) in enumerate(groups):
        digits = ""
        for one, stop in groups[first : first + longest]:
            if len(digits) + stop - one > longest:
                break
            digits += text[one:stop]
            if digits.startswith(_CENTURIES):
                break
            if len(digits) in _CARD_LENGTHS and _has_check_digit(digits):
                yield start, stop


def _has_check_digit(digits: str) -> bool:
    return bool(_library("stdnum.luhn").is_valid(digits))


def ibans(text: str) -> Iterator[Span]:
    """Find international bank account numbers with correct length and check digits.

    A number may begin inside other text that has the form of one.
    """
    is_valid = _library("stdnum.iban").is_valid
    places = set[tuple[int, int]]()
    for copy in folded_copies(text):
        for found in _IBAN.finditer(copy.text):
            own = [place for place in range(*found.span(1)) if copy.text[place].isalnum()]
            # Words that follow have the same characters: the longest valid number counts.
            for size in _checked_sizes([copy.text[place] for place in own]):
                if is_valid("".join(copy.text[place] for place in own[:size])):
                    places.add(copy.span(own[0], own[size - 1] + 1))
                    break
    yield from (Span(*place, "IBAN") for place in sorted(places))


def _checked_sizes(chars: Sequence[str]) -> list[int]:
    """Lengths with correct check digits, longest first."""
    head, rest, found = int("".join(str(int(one, 36)) for one in chars[:4])), 0, list[int]()
    for size, char in enumerate(chars[4:], start=5):
        rest = (rest * (10 if char.isdigit() else 100) + int(char, 36)) % 97
        if size in _IBAN_LENGTHS and (rest * 10**6 + head) % 97 == 1:
            found.append(size)
    return found[::-1]


_SPACED = str.maketrans(dict.fromkeys("_|\u00b7\u2022\\'*[]{}", " "))
"""Separators that `phonenumbers` does not accept between digits."""
_INTERNATIONAL = re.compile(rf"(?:\+|(?<![\d:.,])00)((?:{_FAR}\d){{7,15}})")


def _international_numbers(text: str) -> Iterator[tuple[int, int]]:
    """Find numbers with a country's prefix and any separators."""
    phonenumbers = _library("phonenumbers")
    for found in _INTERNATIONAL.finditer(text):
        ends = [one.end() for one in re.finditer(r"\d+", found[1])]
        for end in reversed(ends):
            digits = re.sub(r"\D", "", found[1][:end])
            if len(digits) < 7:
                break
            try:
                number = phonenumbers.parse(f"+{digits}")
            except phonenumbers.NumberParseException:
                continue
            if phonenumbers.is_valid_number(number):
                yield found.start(), found.start(1) + end
                break


@dataclass(frozen=True)
class Phones:
    """Finds valid telephone numbers."""

    # Two-letter codes of countries whose national forms are found; numbers that begin with a plus
    # are found for all countries.
    regions: tuple[str, ...] = ("US",)

    def __call__(self, text: str) -> Iterator[Span]:
        """Find telephone numbers in a text."""
        phonenumbers = _library("phonenumbers")
        unknown = set(self.regions) - set(phonenumbers.SUPPORTED_REGIONS)
        if unknown:
            raise InputError(
                f"Unknown telephone regions {sorted(unknown)}: use two-letter codes, as US, DE."
            )
        # Folding joins lines, so the original text is searched too.
        read = list(folded_copies(text))
        spaced = [replace(one, text=one.text.translate(_SPACED)) for one in read]
        texts = {one.text.casefold(): one for one in (*read, *spaced, unfolded(text))}
        places = {
            one.span(found.start, found.end)
            for region, one in product(self.regions or (None,), texts.values())
            for found in phonenumbers.PhoneNumberMatcher(one.text, region)
        }
        places |= {one.span(*place) for one in read for place in _international_numbers(one.text)}
        for place in sorted(places):
            yield Span(*place, "PHONE")


def default(phone_regions: Sequence[str] = ("US",)) -> tuple[Recogniser, ...]:
    """Make all recognisers of this module.

    Args:
        phone_regions: see `Phones`.

    Raises:
        InputError: their libraries are not installed.
    """
    _library("stdnum.luhn")
    return ibans, cards, emails, Phones(tuple(phone_regions))


def _library(name: str) -> Any:
    """Import a library of the extra `private`."""
    require("Recognising private spans (not needed with --no-recognise)", "moaspec-core[private]")
    return importlib.import_module(name)
