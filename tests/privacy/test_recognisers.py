"""What is found, and what is not."""

from __future__ import annotations

import pytest

from moaspec.errors import InputError
from moaspec.privacy.recognisers import Phones, Recogniser, cards, emails, ibans


def found(recognise: Recogniser, text: str) -> list[str]:
    return [text[span.start : span.stop] for span in recognise(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mail a.b+c@sub.example.co.uk, please", ["a.b+c@sub.example.co.uk"]),
        ("<jürgen@müller.de>", ["jürgen@müller.de"]),
        ("nobody@ home or @home.org", []),
        ("a@b", []),
    ],
)
def test_emails(text: str, expected: list[str]) -> None:
    assert found(emails, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4111 1111 1111 1111", ["4111 1111 1111 1111"]),
        ("pay 5500-0000-0000-0004 now", ["5500-0000-0000-0004"]),
        ("378282246310005", ["378282246310005"]),
        ("4111 1111 1111 1112", []),  # wrong check digit
        ("exp 4111 1111 1111 1111 12", ["4111 1111 1111 1111"]),
        ("1234", []),
    ],
)
def test_cards(text: str, expected: list[str]) -> None:
    assert set(expected) <= set(found(cards, text))
    assert bool(expected) == bool(found(cards, text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("DE89 3704 0044 0532 0130 00 is mine", ["DE89 3704 0044 0532 0130 00"]),
        ("gb82west12345698765432", ["gb82west12345698765432"]),
        ("DE88 3704 0044 0532 0130 00", []),  # wrong check digits
        ("NO93 8601 1117 947", ["NO93 8601 1117 947"]),
    ],
)
def test_ibans(text: str, expected: list[str]) -> None:
    assert found(ibans, text) == expected


@pytest.mark.parametrize(
    ("text", "regions", "expected"),
    [
        ("call +49 30 901820 today", ("US",), ["+49 30 901820"]),
        ("(415) 555-2671", ("US",), ["(415) 555-2671"]),
        ("030 901820", ("DE",), ["030 901820"]),
        ("030 901820", ("US",), []),
        ("in 2024 I had 12345", ("US", "DE"), []),
        ("+44 20 7946 0958", (), ["+44 20 7946 0958"]),
    ],
)
def test_phones(text: str, regions: tuple[str, ...], expected: list[str]) -> None:
    assert found(Phones(regions), text) == expected


SPELLINGS = {
    "no-break spaces": lambda text: text.replace(" ", "\u00a0"),
    "thin spaces": lambda text: text.replace(" ", "\u2009"),
    "double spaces": lambda text: text.replace(" ", "  "),
    "dots": lambda text: text.replace(" ", "."),
    "spaced dashes": lambda text: text.replace(" ", " - "),
    "en dashes": lambda text: text.replace(" ", "\u2013"),
    "non-breaking hyphens": lambda text: text.replace(" ", "\u2011"),
    "slashes": lambda text: text.replace(" ", "/"),
    "line breaks": lambda text: text.replace(" ", "\r\n"),
    "nothing": lambda text: text.replace(" ", ""),
    "characters that nobody sees": lambda text: "\u200b".join(text),
    "soft hyphens": lambda text: text.replace(" ", "\u00ad"),
    "full width": lambda text: "".join(
        chr(ord(char) + 0xFEE0) if char.isalnum() or char == "@" else char for char in text
    ),
    "Arabic digits": lambda text: "".join(
        chr(0x660 + int(char)) if char.isdigit() else char for char in text
    ),
    "lower case": str.lower,
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(
    ("recognise", "text"),
    [
        (cards, "4111 1111 1111 1111"),
        (cards, "3782 822463 10005"),
        (ibans, "DE89 3704 0044 0532 0130 00"),
        (ibans, "GB82 WEST 1234 5698 7654 32"),
        (emails, "ada@example.org"),
    ],
)
def test_forms_in_which_people_type_and_paste(
    recognise: Recogniser, text: str, spelling: str
) -> None:
    spelled = SPELLINGS[spelling](text)
    assert found(recognise, f"Here: {spelled}, thanks.") == [spelled]


@pytest.mark.parametrize("number", ["+49 30 901820", "+1 415 555 2671"])
@pytest.mark.parametrize(
    "spelling", ["no-break spaces", "double spaces", "full width", "en dashes"]
)
def test_forms_of_phone_numbers(number: str, spelling: str) -> None:
    spelled = SPELLINGS[spelling](number)
    assert any(spelled in one for one in found(Phones(), f"Call {spelled} now"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Ref AB12 to DE89 3704 0044 0532 0130 00", ["DE89 3704 0044 0532 0130 00"]),
        (
            "DE89370400440532013000 NO9386011117947",
            ["DE89370400440532013000", "NO9386011117947"],
        ),
        (
            "DE89 3704 0044 0532 0130 00\nGB82 WEST 1234 5698 7654 32",
            ["DE89 3704 0044 0532 0130 00", "GB82 WEST 1234 5698 7654 32"],
        ),
        ("IBAN:DE89370400440532013000", ["DE89370400440532013000"]),
        ("IBANDE89370400440532013000", ["DE89370400440532013000"]),
    ],
)
def test_ibans_behind_what_looks_like_one(text: str, expected: list[str]) -> None:
    assert found(ibans, text) == expected


def test_an_unknown_region() -> None:
    with pytest.raises(InputError, match="XX"):
        list(Phones(("XX",))("text"))
