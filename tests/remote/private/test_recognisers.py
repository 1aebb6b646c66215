"""What is found, and what is not."""

from __future__ import annotations

import pytest

from moaspec.errors import InputError
from moaspec.remote.private import Phones, Recogniser, cards, emails, ibans


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


def test_an_unknown_region() -> None:
    with pytest.raises(InputError, match="XX"):
        list(Phones(("XX",))("text"))
